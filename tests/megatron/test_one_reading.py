"""A set of flags means the same to training and to every command: the pure ``job`` package decides it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from typer.testing import CliRunner

from megatron_pp_ext import cpu
from megatron_pp_ext.cli import app
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import placements_of
from megatron_pp_ext.costs import system
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world, permitted
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner.search import launch_lines
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.candidate import Candidate, Recompute
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.result import Compiles
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file, csv_file
from megatron_pp_ext.schedule.placement import wave
from tests.support.flags import estimated, pasted, read, read_by_commands, validated
from tests.support.training import TINY

P4 = "--pipeline-model-parallel-size 4"
UNTIED = "--untie-embeddings-and-output-weights"
FLEX = f"{P4} --pipeline-schedule flex --pipeline-memory-limit"
LAYOUT = "--pipeline-model-parallel-layout"

ACCEPTED = {
    "v-half": f"{P4} --num-layers 16 --pipeline-schedule v-half",
    "alias": f"{P4} --pipeline-schedule zbv",
    "few microbatches": f"{P4} --pipeline-schedule v-half --global-batch-size 3",
    "four chunks": f"{P4} --num-layers 16 --num-virtual-stages-per-pipeline-rank 4 "
    "--pipeline-schedule interleaved",
    "layers a chunk": f"{P4} --num-layers 16 --num-layers-per-virtual-pipeline-stage 1 "
    "--pipeline-schedule interleaved-zb",
    "layout of a V": f"{P4} --num-layers 6 {LAYOUT} E|t|t|t*2|t|t||L --pipeline-schedule v-half",
    "layout of a line": f"{P4} {LAYOUT} Et*3|t*2|(t)*2|tL --pipeline-schedule zb-h1",
    "ends": f"{P4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
    "--pipeline-schedule zb-h1",
    "ends that count": f"{P4} --num-layers 6 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --pipeline-schedule v-zb",
    "flex": f"{FLEX} 0.9 --global-batch-size 2",
    "flex, bytes": f"{FLEX} 1e6",
    "flex on a line": f"{FLEX} 1 --num-layers 4",
    "flex, four chunks": f"{FLEX} 0.75 --num-layers 16 --num-virtual-stages-per-pipeline-rank 4",
    "auto, layout of four chunks": f"{P4} --num-layers 14 {LAYOUT} E|(t|)*14L --pipeline-schedule auto",
    "flex, limits by rank": f"{FLEX} 0.9-0.8-0.8-0.75",
    "flex, ends, three chunks": f"{FLEX} 2 --num-layers 24 --num-virtual-stages-per-pipeline-rank 3 "
    "--decoder-first-pipeline-num-layers 6",
    "pipedream": f"{P4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream",
    "pipedream-2bw": f"{P4} --pipeline-allow-waits --global-batch-size 4 --pipeline-schedule pipedream-2bw",
    "stock, interleaved": f"{P4} --num-virtual-stages-per-pipeline-rank 2 --pipeline-trace trace.json",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_all_read_the_same(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Training, estimates, and where it can be a rehearsal."""
    training = read(monkeypatch, ACCEPTED[case])
    request = estimated(ACCEPTED[case].replace("--pipeline-trace trace.json", ""))
    assert training.request == request
    assert training.placement in request.placements
    assert training.updates == request.updates
    if case.split(",")[0] in ("stock", "auto", "pipedream", "pipedream-2bw"):
        return
    rehearsal = f"--rehearse-pipeline {tmp_path}/0.json --fake-process-group"
    rehearsed = read(monkeypatch, f"{ACCEPTED[case]} {rehearsal}")
    assert rehearsed.request == request
    job = read_by_commands(cpu.with_cpu_flags([*TINY, *ACCEPTED[case].split()]))
    assert rehearsed.layers == tuple(layers.by_stage(job, rehearsed.placement.stages))


COSTS = Costs(tuple(StageCosts(10 + s % 3, 11, 7, activation=4.0) for s in range(8)), hop=1.0)


@pytest.mark.parametrize(("limit", "batch"), [("0.75", 8), ("20", 2)])
def test_a_limit_compiles_to_one_schedule(
    limit: str, batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training, the request of the planner, and ``mpp schedule``, from one file of costs."""
    costs_file.write(COSTS, tmp_path / "costs.json")
    flags = f"{FLEX} {limit} --global-batch-size {batch} --pipeline-costs {tmp_path}/costs.json"
    trained = read(monkeypatch, flags).source.schedule(batch)
    planned = make(estimated(flags), CostModel.fixed(COSTS)).schedule
    words = f"schedule flex -p 4 -m {batch} --memory-limit {limit} --costs {tmp_path}/costs.json"
    shown = CliRunner().invoke(app, [*words.split(), "--json", str(tmp_path / "found.json")])
    assert shown.exit_code == 0, shown.output
    assert trained.digest == planned.digest == json.loads((tmp_path / "found.json").read_text())["digest"]


@pytest.mark.parametrize(("name", "chunks"), [(name, None) for name in catalog.NAMES] + [("interleaved", 4)])
def test_a_family_is_one_schedule(
    name: str, chunks: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks else ""
    flags = f"{P4} --num-layers 16 --pipeline-schedule {name} {virtual}"
    pipeline = read(monkeypatch, flags)
    assert pipeline.request == estimated(flags)
    words = ["schedule", name, "-p", "4", "-m", "8", *(["--chunks", str(chunks)] if chunks else [])]
    shown = CliRunner().invoke(app, [*words, "--json", str(tmp_path / "found.json")])
    digest = json.loads((tmp_path / "found.json").read_text())["digest"]
    assert pipeline.source.schedule(8).digest == digest, shown.output


def test_waves_are_among_the_placements_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four chunks a rank ``flex`` compiles for all cuts into one, two and four."""
    request = estimated(ACCEPTED["flex, four chunks"])
    assert request.placements == placements_of(4, Costs.unit(wave(4, 4)))
    quarters = Costs((StageCosts(1, 1, 1),) * 16)
    few = replace(request, trials=10)
    assert make(few, CostModel.fixed(quarters)).schedule.placement in request.placements


@pytest.mark.parametrize(
    "layout",
    ["Ettt|(tt|)*3,tt|L", "Et*5|t*3L", "E|t*2,t|(t|)*2ttm*2,L", "E,(t)*3|(|t)*2|L", "(E|)*1(t|)*12L", "EtL"],
)
def test_a_layout_is_read_as_megatron_reads_it(layout: str) -> None:
    letters = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
    ours = layers.stages_of(layout)
    assert ours == tuple("".join(letters[kind] for kind in stage) for stage in theirs)
    names = [[f" {kind.name.upper()}" for kind in stage] for stage in theirs]
    for form in (layout, theirs, names, PipelineParallelLayerLayout(names, 1)):
        assert layers.stages_of(layers.spelled_layout(form)) == ours


@pytest.mark.parametrize("layout", ["Ex|tL", "E(t|tL", "Et*|L", "E t|L", "E(tt)|L"])
def test_a_layout_that_megatron_cannot_read_is_refused(layout: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        PipelineParallelLayerLayout.parse_str_to_list(layout)
    with pytest.raises(ValueError, match=r"-parallel-layout .* has .* must stand; correct it"):
        layers.stages_of(layout)


MODEL = shlex.split(
    "--num-layers 16 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 1000 --train-iters 10 "
    "--lr 0.001 --eval-interval 1000 --mock-data"
)
GPUS = 8


def _candidates() -> dict[str, Candidate]:
    best: dict[str, Candidate] = {}
    plain = Candidate(1, 1, 1, 4, 2, 1, 16, Recompute("none"))
    for name in ("1f1b", "v-zb", "interleaved-zb"):
        best[name] = replace(plain, schedule=name, chunks=catalog.entry(name).chunks)
    best["four chunks"] = replace(plain, schedule="interleaved", chunks=4)
    best["flex"] = replace(plain, schedule="flex", chunks=2, limit=0.75)
    best["flex, by rank"] = replace(best["flex"], limit=(3e10, 4e10, 4e10, 35123456789.0))
    best["context"] = replace(plain, context=2, data=1, schedule="v-half", chunks=2)
    best["tensor, recomputed"] = replace(
        plain, tensor=2, data=1, micro_batch=2, schedule="v-half", chunks=2,
        recompute=Recompute("all", "full", "uniform", 1),
    )  # fmt: skip
    return best


def test_the_planners_lines_pass_megatrons_validation_and_come_back_as_the_same_request() -> None:
    """The flags of every torchrun line that a search prints, from text to Megatron's validated arguments."""
    job = read_by_commands(cpu.with_cpu_flags(MODEL))
    for name, candidate in _candidates().items():
        launch = launch_lines.Launch(candidate.flags([*MODEL, *missing(MODEL)]), GPUS, GPUS)
        assert all(len(line) < 80 for line in launch.text.splitlines())
        variables, flags = pasted(launch.text)
        args, request = validated(flags, GPUS, variables)
        expected = for_world(asked_of(candidate.described(job)), GPUS)
        assert request == expected, name
        assert candidate.placement in request.placements, name
        assert (args.data_parallel_size, args.micro_batch_size) == (candidate.data, candidate.micro_batch), (
            name
        )
        assert (args.virtual_pipeline_model_parallel_size or 1) in {p.chunks for p in request.placements}, (
            name
        )


def test_a_file_is_estimated_as_the_family_that_it_spells(tmp_path: Path) -> None:
    csv_file.write(catalog.build("v-zb", 4, 8), tmp_path / "mine.csv")
    found = []
    for name in ("v-zb", f"csv:{tmp_path}/mine.csv"):
        asked = read_by_commands(cpu.with_cpu_flags([*TINY, *f"{P4} --pipeline-schedule {name}".split()]))
        estimate = estimate_request(asked, system.read("h100"), for_world(asked, 4))
        # The range of published runs names the file instead of the family.
        found.append(replace(estimate, band=None))
    assert found[0] == found[1]


def test_a_search_needs_no_other_reading() -> None:
    """What a search compares is what its candidates' flags request."""
    job = read_by_commands(cpu.with_cpu_flags(MODEL)).changed(pipeline_model_parallel_size=4)
    space = Space(job, GPUS, GPUS, 32, ("v-half",), ("pipeline_model_parallel_size",))
    found = Search(space, system.read("h100"), 80e9, top=3, compiles=Compiles.NEVER).run()
    for one in found.best:
        chosen = one.candidate.described(job)
        again = estimate_request(chosen, system.read("h100"), for_world(asked_of(chosen), GPUS))
        assert again.step_seconds == one.estimate.step_seconds


def test_a_search_leaves_out_what_training_refuses() -> None:
    overlaps = "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel --bf16"
    quantized = "--fp8-format e4m3 --fp8-recipe mxfp8 --transformer-impl transformer_engine"
    asked = read_by_commands(cpu.with_cpu_flags([*MODEL, *f"{overlaps} {quantized}".split()]))
    assert permitted(asked, catalog.NAMES) == [
        name for name in catalog.NAMES if not catalog.entry(name).splits_backward
    ]
    with pytest.raises(ValueError, match="zb-h1 does not support --tp-comm-overlap: with"):
        permitted(asked, ["zb-h1", "flex"])
