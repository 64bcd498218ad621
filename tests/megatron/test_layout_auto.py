"""--pipeline-model-parallel-layout auto: every rank trains in the layout that the start line names."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.megatron import start_up
from megatron_pp_ext.megatron.runners import choose
from megatron_pp_ext.megatron.start_up import estimate
from tests.support.comparison import assert_same_gradients, run, stock
from tests.support.flags import PP4, arguments, assert_refused, requested_by
from tests.support.tiers import first

AUTO = "--pipeline-model-parallel-layout auto"


def chosen(line: str) -> str:
    found = re.search(r"layout (\S+), by prediction (\S+)% shorter than stages of as many layers each", line)
    assert found, line
    assert float(found[2]) >= 0
    return found[1]


@pytest.mark.parametrize(
    ("ranks", "flags", "schedule"),
    first(
        1,
        [
            (2, "--num-layers 7", "--pipeline-schedule v-half"),
            (4, "--num-layers 9 --untie-embeddings-and-output-weights", ""),
            (
                2,
                "--num-layers 5 --mtp-num-layers 1 --position-embedding-type rope --disable-bias-linear "
                "--num-experts 2 --moe-layer-freq [0]*2+[1]*3",
                "--pipeline-schedule 1f1b",
            ),
            (2, "--num-layers 7", "--pipeline-schedule flex --pipeline-memory-limit 1"),
        ],
    ),
)
def test_trains_as_stock_in_the_layout_that_is_printed(
    ranks: int, flags: str, schedule: str, said_by: Callable[[ModuleType], Path]
) -> None:
    said = said_by(choose)
    base = ["--pipeline-model-parallel-size", str(ranks), *flags.split()]
    ours = run(ranks, [*base, *AUTO.split(), *schedule.split()])
    (line,) = [line for line in said.read_text().splitlines() if "layout" in line]
    layout = chosen(line)
    stages = layers.stages_of(layout)
    # Stock runs one stage a rank, which has the layers of a loop's chunks or of a V's; the sums are the same.
    merged = f"{stages[0]}|{''.join(stages[1:])}" if ranks == 2 else "|".join(stages)
    assert_same_gradients(ours, stock(ranks, *base, "--pipeline-model-parallel-layout", merged))


def read(flags: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int], str]:
    """Return the layout of a job on four ranks, the layers of its stages, and its start line."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} {AUTO} {flags}")
    pipeline = requested_by(args)
    assert pipeline is not None
    layout = args.pipeline_model_parallel_layout
    counts = layers.by_stage(Job.of(args), pipeline.placement.stages)
    return layout, counts, start_up.summary(pipeline, estimate(RequestedJob.of_args(args)))


@pytest.mark.parametrize("layer_count", [7, 8, 61])
@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "interleaved"])
def test_any_number_of_layers(layer_count: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--num-layers {layer_count} --pipeline-schedule {schedule}"
    chunks = 1 if schedule in ("1f1b", "zb-h1") else 2
    if layer_count < 4 * chunks:
        message = f"has {4 * chunks} stages to fill with --num-layers {layer_count}; lower"
        assert_refused(monkeypatch, f"{PP4} {AUTO} {flags}", message)
        return
    layout, counts, line = read(flags, monkeypatch)
    assert (len(counts), sum(counts)) == (4 * chunks, layer_count)
    assert chosen(line) == layout
    assert "\n" not in line


@pytest.mark.parametrize("schedule", ["v-half", "v-half --pipeline-loss-rank last", "zb-h1"])
def test_multi_token_prediction_is_laid_out_too(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predicting = "--mtp-num-layers 1 --position-embedding-type rope"
    layout, counts, _ = read(f"--num-layers 61 {predicting} --pipeline-schedule {schedule}", monkeypatch)
    assert sum(counts) == 61
    assert layout.endswith("mL")
    assert counts[-1] < max(counts)


def test_the_loss_takes_layers_from_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is as much work as several layers leaves fewer of them to the last stage."""
    _, few, _ = read("--num-layers 16 --pipeline-schedule 1f1b", monkeypatch)
    _, many, _ = read("--num-layers 16 --pipeline-schedule 1f1b --vocab-size 2048", monkeypatch)
    assert many[-1] < few[-1] <= 4


def test_costs_of_every_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 has most microbatches in flight: a third layer would need more memory than even stages do."""
    seconds, file = [1, 1, 1, 1, 1, 1, 3, 3], tmp_path / "costs.json"
    stages = [{"forward": s, "input_gradient": s, "weight_gradient": s, "activation": 1} for s in seconds]
    file.write_text(json.dumps({"stages": stages}))
    layout, counts, line = read(f"--pipeline-schedule 1f1b --pipeline-costs {file}", monkeypatch)
    assert counts == [2, 2, 3, 1]
    assert chosen(line) == layout
