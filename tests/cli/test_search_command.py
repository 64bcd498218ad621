"""``mpp search`` by stages that were measured, and of schedules that refuse some flags."""

import json

import pytest

from megatron_pp_ext.job.pipeline import for_world, is_permitted
from megatron_pp_ext.planner import described
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.tiers import wide

MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 256 "
    "--num-experts 4 --moe-router-topk 2 --bf16 --hybrid-layer-pattern XE|X*|X-|XE"
)
KEPT = (
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 1 "
    "--context-parallel-size 1 --expert-model-parallel-size 1"
)
SHORT = StageCosts(1e-3, 1e-3, 1e-3, 1e9, 0.0, parameters=1e6)
LONG = StageCosts(2e-3, 2e-3, 2e-3, 2e9, 0.0, parameters=1e6)
STAGES = Costs((LONG, LONG, SHORT, SHORT), hop=1e-4, message=1e6)
GB = 1e9


@pytest.fixture
def costs(tmp_path):
    costs_file.write(STAGES, tmp_path / "costs.json")
    return tmp_path / "costs.json"


def searched(mpp, folder, *words):
    file = folder / "found.json"
    result = mpp("search", "--json", file, "--no-ask", *words)  # X is a letter of a fork
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())["best"][0], result.output


JOB = ("--gpus", 4, "--global-batch-size", 16)


@pytest.mark.parametrize(
    ("memory", "names", "best", "pattern"),
    [
        (60 * GB, "1f1b,zb-h1,v-half,v-zb", "v-zb", "XE|X*|X-|XE"),
        (10 * GB, "1f1b,zb-h1,v-half,v-zb", "v-half", "XE|X*|X-|XE"),
        (60 * GB, "1f1b,zb-h1", "zb-h1", "XEX*|X-XE"),
    ],
)
def test_a_search_chooses_by_measured_stages(memory, names, best, pattern, mpp, costs, tmp_path):
    """What is found fits, is the fastest of those that do, and its flags say so to mpp estimate and training.

    A V gives both ranks as much work.  V-Half keeps 7 GB of activations, and the others 8.
    """
    flags = [*MODEL.split(), *KEPT.split(), "--pipeline-costs", costs]
    found, output = searched(mpp, tmp_path, *JOB, "--memory", memory, "--schedules", names, "--", *flags)
    assert found["candidate"]["schedule"] == best
    assert f"The 4 stages in {costs} and --tensor-model-parallel-size 1, " in " ".join(output.split())
    words = found["flags"]
    assert words[words.index("--hybrid-layer-pattern") + 1] == pattern
    assert words.count("--hybrid-layer-pattern") == 1
    file, steps = tmp_path / "one.json", {}
    for name in names.split(","):
        entry = catalog.entry(name)
        schedule = catalog.build(name, 2, 8, entry.chunks)
        steps[name] = simulate(schedule, STAGES.merged(2 * entry.chunks)).makespan
    assert found["estimate"]["pipeline_seconds"] == pytest.approx(steps[best])
    assert best == min(steps, key=steps.__getitem__) or memory < 60 * GB
    result = mpp("estimate", "--no-ask", "--world-size", 4, "--json", file, "--", *words)
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["step_seconds"] == pytest.approx(found["estimate"]["step_seconds"])
    assert "MFU unknown" in result.output


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            "--micro-batch-size 1 --context-parallel-size 1",
            "but not --tensor-model-parallel-size, --expert-model-parallel-size, "
            "--pipeline-model-parallel-size: give what the stages were measured with",
        ),
        (f"{KEPT} --tensor-model-parallel-size 2", "of stages without --sequence-parallel: a search has it"),
        (
            f"{KEPT} --pipeline-model-parallel-size 3",
            "has 4 stages, which --pipeline-model-parallel-size 3 does not divide: measure 3 or 6 stages",
        ),
    ],
)
def test_a_search_keeps_the_sizes_that_were_measured(kept, message, mpp, costs):
    result = mpp("search", *JOB, "--", *MODEL.split(), *kept.split(), "--pipeline-costs", costs)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


BATCHED = "--no-overlap-p2p-communication"
SMALL_MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --untie-embeddings-and-output-weights "
    f"--pipeline-model-parallel-size 2 {BATCHED}"
)


@pytest.fixture
def search(mpp, tmp_path):
    def run(*words):
        file = tmp_path / "found.json"
        sizes = "--gpus", 8, "--global-batch-size", 16, "--layout", "even", "--json", file
        result = mpp("search", *sizes, *words, "--", *SMALL_MODEL.split())
        return result, json.loads(file.read_text()) if file.exists() else None

    return run


@pytest.mark.parametrize(
    "words", [("--schedules", "gpipe,1f1b,zb-h1"), wide(((),)), wide((("--schedules", "all"),))]
)
def test_megatrons_own_schedules_are_left_where_all_others_refuse_a_flag(words, search):
    result, content = search(*words)
    assert result.exit_code == 0, result.output
    every = [*content["best"], *content["for_less_memory"]]
    assert {one["candidate"]["schedule"] for one in every} <= {"1f1b", "interleaved"}
    for one in every:
        assert BATCHED in one["flags"] and "--pipeline-schedule" not in one["flags"]
        asked = described.read(one["flags"], None).job
        assert is_permitted(asked)
        request = for_world(asked, 8)
        assert request.is_stock
        assert (request.schedule, request.ranks) == (
            one["candidate"]["schedule"],
            one["candidate"]["pipeline"],
        )


def test_a_schedule_that_refuses_the_flag_alone_is_an_error_of_one_line(search):
    result, content = search("--schedules", "zb-h1,v-half")
    assert result.exit_code and content is None
    assert f"--pipeline-schedule zb-h1 does not support {BATCHED}" in " ".join(result.output.split())
