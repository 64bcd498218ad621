"""An estimate of stages that were measured, of layers without formulas: sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import rounding

H100 = system.read("h100")
FIRST = StageCosts(1.0, 1.0, 2.0, 1e6, 4e5, parameters=1000, expert_parameters=600)
LAST = StageCosts(2.0, 1.0, 3.0, 3e6, 0.0, parameters=3000)
MEASURED = Costs((FIRST, LAST), hop=0.5, message=1e5)

MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 256 "
    "--micro-batch-size 1 --bf16 --pipeline-model-parallel-size 2"
)
UNKNOWN = f"{MODEL} --num-experts 4 --moe-router-topk 2 --hybrid-layer-pattern XE|X-"
"""X stands for layers of a kind that no release has yet."""
DENSE = f"{MODEL} --num-layers 4"
COARSE = f"{MODEL} --num-layers 4 --te-precision-config-file file"
EXACT = rounding.relative(eps=rounding.FLOAT64)


def estimated(flags: str, costs: Costs | None, folder: Path, gpus: int = 2, batch: int = 2) -> Estimate:
    words = [*flags.split(), "--global-batch-size", str(batch)]
    if costs is not None:
        costs_file.write(costs, folder / "costs.json")
        words += ["--pipeline-costs", str(folder / "costs.json")]
    asked = described.read(words, None).counted()
    return estimate_request(asked, H100, for_world(asked, gpus))


def test_a_step_is_the_replay_of_the_measured_stages(tmp_path: Path) -> None:
    """Rank 1 begins at 1.5, takes 6 s a microbatch, and rank 0 ends with the backward that follows.

    Its last gradient arrives at 1.5 + 12 + 0.5.
    """
    found = estimated(f"{UNKNOWN} --pipeline-schedule 1f1b", MEASURED, tmp_path)
    assert found.pipeline_seconds == pytest.approx(14 + 3, rel=EXACT)
    assert found.bubble == pytest.approx(1 - (2 * 4 + 2 * 6) / (2 * 17), rel=EXACT)
    assert (found.utilisation, found.band, found.stages_from) == (None, None, str(tmp_path / "costs.json"))
    assert found.tokens_per_second == 2 * 64 / found.step_seconds


def test_memory_is_that_of_the_measured_weights_and_activations(tmp_path: Path) -> None:
    """In bf16 a weight takes 2 bytes, its gradient 4, and Adam's state with an fp32 copy 12."""
    flags = f"{UNKNOWN} --pipeline-schedule 1f1b"
    first, last = estimated(flags, MEASURED, tmp_path).ranks
    assert (first.weights, first.gradients, first.optimizer) == (2 * 1600, 4 * 1600, 12 * 1600)
    assert (last.weights, last.gradients, last.optimizer) == (2 * 3000, 4 * 3000, 12 * 3000)
    assert (first.activations, last.activations) == (2e6, 3e6)
    assert (first.messages % 1e5, first.loss) == (0, 0)
    assert last.loss > 0
    sharded = f"{flags} --use-distributed-optimizer --expert-model-parallel-size 2"
    first, _ = estimated(sharded, MEASURED, tmp_path, gpus=8, batch=8).ranks
    # Four ranks share the state of what each of them has, and two that of an expert.
    assert first.optimizer == 12 * (1000 / 4 + 600 / 2)


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "interleaved"])
def test_any_schedule_is_replayed_with_them(name: str, tmp_path: Path) -> None:
    """Between I and W a microbatch keeps what the I did not give back."""
    chunks = catalog.entry(name).chunks
    pattern = "|".join(["X"] * 2 * chunks)
    flags = f"{MODEL} --hybrid-layer-pattern {pattern} --pipeline-schedule {name}"
    costs = Costs((FIRST, LAST) * chunks, hop=0.5, message=1e5)
    found = estimated(flags, costs, tmp_path, batch=6)
    schedule = catalog.build(name, 2, 6, chunks)
    timeline = simulate(schedule, costs)
    assert found.pipeline_seconds == pytest.approx(timeline.makespan, rel=EXACT)
    assert [rank.activations for rank in found.ranks] == pytest.approx(timeline.peak_activations, rel=EXACT)


def test_messages_that_were_not_measured_are_the_system_s(tmp_path: Path) -> None:
    flags = f"{UNKNOWN} --pipeline-schedule 1f1b"
    found = estimated(flags, replace(MEASURED, hop=0.0, message=0.0), tmp_path)
    asked = described.read([*flags.split(), "--pipeline-costs", str(tmp_path / "costs.json")], None).counted()
    work = Workload(asked, H100, catalog.entry("1f1b").placement(2, 1), 1)
    assert work.message == 2 * 64 * 64  # bf16
    assert work.hop > 0
    # Both ways between two ranks, around rank 1's work.
    assert found.pipeline_seconds == pytest.approx(1 + 12 + 3 + 2 * work.hop, rel=EXACT)


def test_stages_of_a_finer_cut_are_joined(tmp_path: Path) -> None:
    flags = f"{UNKNOWN} --pipeline-schedule 1f1b"
    halves = [
        StageCosts(*(value / 2 for value in (one.forward, one.input_gradient, one.weight_gradient,
                                             one.activation, one.released_by_input_gradient,
                                             one.parameters, one.expert_parameters)))
        for one in (FIRST, FIRST, LAST, LAST)
    ]  # fmt: skip
    whole = estimated(flags, MEASURED, tmp_path)
    assert estimated(flags, replace(MEASURED, stages=tuple(halves)), tmp_path) == whole


def test_a_file_without_parameters_leaves_them_to_formulas(tmp_path: Path) -> None:
    """So do the operations, and with them the utilisation."""
    flags = f"{DENSE} --pipeline-schedule zb-h1"
    stages = tuple(replace(one, parameters=0.0, expert_parameters=0.0) for one in MEASURED.stages)
    plain, found = estimated(flags, None, tmp_path), estimated(flags, Costs(stages), tmp_path)
    for name in ("weights", "gradients", "optimizer"):
        assert [getattr(one, name) for one in found.ranks] == [getattr(one, name) for one in plain.ranks]
    assert plain.utilisation is not None and found.utilisation is not None
    operations = found.utilisation * found.step_seconds
    assert operations == pytest.approx(plain.utilisation * plain.step_seconds, rel=EXACT)
    assert found.step_seconds > 10 > plain.step_seconds


def test_pairs_take_what_the_file_says(tmp_path: Path) -> None:
    flags = (
        f"{COARSE} --num-experts 4 --moe-router-topk 2 --disable-bias-linear --pipeline-schedule dualpipe-v "
        "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall"
    )
    costs = Costs((FIRST,) * 4, hop=0.5, pair=0.8)
    found = estimated(flags, costs, tmp_path, gpus=4, batch=12)
    schedule = catalog.entry("dualpipe-v").build(2, 6, 2, True)
    assert found.pipeline_seconds == pytest.approx(simulate(schedule, costs).makespan, rel=EXACT)


def test_ranks_share_a_vocabulary_as_it_was_measured(tmp_path: Path) -> None:
    """Its part is on every rank, and its weights are among those of the stages."""
    flags = f"{DENSE} --pipeline-schedule 1f1b --pipeline-vocabulary shared"
    part = HeadCosts(scores=1.0, weight_gradient=0.5, activation=1e4)
    found = estimated(flags, replace(MEASURED, head=part), tmp_path, batch=8)
    alone = estimated(f"{DENSE} --pipeline-schedule 1f1b", MEASURED, tmp_path, batch=8)
    assert found.pipeline_seconds > alone.pipeline_seconds
    assert [rank.weights for rank in found.ranks] == [2 * 1600, 2 * 3000]
    with pytest.raises(ValueError, match=r"costs.json has no costs of a rank's part of the head; add a"):
        estimated(flags, MEASURED, tmp_path)


WITHOUT = Costs((StageCosts(1.0, 1.0, 1.0),) * 2)


@pytest.mark.parametrize(
    ("flags", "costs", "message"),
    [
        (
            UNKNOWN,
            None,
            r"the layers X of .*; measure the stages with mpp rehearse --costs FILE, which count",
        ),
        (UNKNOWN, WITHOUT, r'which counts their "parameters" too, and give --pipeline-costs FILE$'),
        (COARSE, None, "or measure the stages with mpp rehearse --costs FILE and give --pipeline-costs"),
        (COARSE, WITHOUT, r'add "parameters" to every one of the "stages" in .*\.json, as'),
        (f"{UNKNOWN} --use-torch-fsdp2", MEASURED, "the planner does not support --use-torch-fsdp2: "),
        (UNKNOWN, Costs((FIRST,) * 3), "costs.json: costs of 3 stages cannot be merged into 2: give costs"),
    ],
)
def test_refusals(flags: str, costs: Costs | None, message: str, tmp_path: Path) -> None:
    """Other precisions and kinds of layers can be estimated from measured stages alone."""
    assert estimated(f"{COARSE} --pipeline-schedule 1f1b", MEASURED, tmp_path).pipeline_seconds == 17
    with pytest.raises(ValueError, match=message) as error:
        estimated(f"{flags} --pipeline-schedule 1f1b", costs, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "joined"),
    [
        ("--hybrid-layer-pattern M*|ME|M-|M*/*-", {"hybrid_layer_pattern": "M*ME|M-M*/*-"}),
        ("--hybrid-layer-pattern M*MEM-M*", {}),
        (
            "--num-layers 5 --pipeline-model-parallel-layout Et|t|tt|tL",
            {"pipeline_model_parallel_layout": "Et*2|t*3L"},
        ),
    ],
)
def test_the_flags_of_joined_stages(flags: str, joined: dict[str, str]) -> None:
    job = described.read([*MODEL.split(), *flags.split()], None).job
    assert layers.joined(job, 2) == joined
