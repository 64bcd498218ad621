"""The same job under Megatron's own schedules, beside what a schedule is predicted to take."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.costs import system
from megatron_pp_ext.job import pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.launch import AllProducts
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step import comparison
from megatron_pp_ext.planner.step.comparison import Alternative, Comparison, at_start, compared
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MACHINE = system.read("h100")
FLAGS = (
    "--micro-batch-size 1 --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer "
    "--pipeline-model-parallel-size 8 --pipeline-schedule v-half"
)
DATA = 2


def asked(flags: str = "") -> RequestedJob:
    sizes = {"global_batch_size": 64, "seq_length": 8192}
    return described.read(f"{FLAGS} {flags}".split(), "llama3-70b", sizes).counted()


def estimated(job: RequestedJob, **values: object) -> Estimate:
    changed = job.with_arguments(**values)
    return estimate_request(changed, MACHINE, pipeline.read(changed, DATA))


def beside(job: RequestedJob) -> Comparison | None:
    return compared(job, MACHINE, DATA, estimated(job))


def test_the_shortest_interleaved_that_fits_is_shown() -> None:
    """The shortest of all has 5 chunks a rank and needs more memory than there is."""
    job = asked()
    steps = {
        chunks: estimated(job, pipeline_schedule=None, num_virtual_stages_per_pipeline_rank=chunks)
        for chunks in (2, 5, 10)
    }
    assert min(steps, key=lambda chunks: steps[chunks].step_seconds) == 5
    assert steps[5].fullest.total > MACHINE.memory_bytes > steps[10].fullest.total
    found = beside(job)
    assert found and found.interleaved
    assert found.interleaved.name == "stock interleaved, 10 chunks a rank"
    assert found.interleaved.step_seconds == pytest.approx(steps[10].step_seconds)
    roomy = replace(MACHINE, memory_bytes=1e12)
    found = compared(job, roomy, DATA, estimated(job))
    assert found and found.interleaved and found.interleaved.name.endswith(" 5 chunks a rank")


def test_a_layout_and_flags_of_the_schedule_are_left_out() -> None:
    """Stock's figures are those of the plain job, whatever the choice has besides."""
    layout = "|".join(["Etttt", *["ttttt"] * 14, "ttttttL"])
    plain = beside(asked())
    job = asked(
        f"--pipeline-vocabulary shared --pipeline-offload 0.2 --pipeline-model-parallel-layout {layout}"
    )
    found = beside(job)
    assert plain and found and found.stock == plain.stock and found.interleaved == plain.interleaved
    assert found.chosen != plain.chosen and plain.shared and not found.shared


@pytest.mark.parametrize("flags", ["--pipeline-schedule 1f1b", "--pipeline-schedule interleaved"])
def test_nothing_stands_beside_stock_itself(flags: str) -> None:
    assert beside(asked(flags)) is None
    assert beside(asked().with_arguments(pipeline_schedule=None)) is None
    found = beside(asked(f"{flags} --pipeline-vocabulary shared"))
    assert found and found.stock and found.stock.step_seconds > found.chosen.step_seconds


def test_too_many_actions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B has 8 x 32 x 2, interleaved twice as many for two chunks, and more for more."""
    rows = pytest.fail
    assert len(at_start(asked(), DATA, rows)) == 1
    monkeypatch.setattr(comparison, "_MOST_ACTIONS", 2 * 8 * 32 * 2 + 8 * 32 * 2)
    found = beside(asked())
    assert found and found.stock and not found.shared
    assert found.interleaved and found.interleaved.name.endswith(" 2 chunks a rank")
    assert at_start(asked(), DATA, rows) != []
    monkeypatch.setattr(comparison, "_MOST_ACTIONS", 8 * 32 * 2)
    assert at_start(asked(), DATA, rows) == []


def test_warnings_state_both_facts() -> None:
    def warned(stock: tuple[float, float], interleaved: tuple[float, float]) -> list[str]:
        pair = Alternative("stock 1F1B", *stock), Alternative("stock interleaved", *interleaved)
        return Comparison(Alternative("v-min", 11.0, 40e9), *pair, None).warnings

    assert warned((12, 50e9), (12, 60e9)) == []
    assert warned((10, 50e9), (10, 60e9)) == [
        "warning: v-min is predicted to take 10.0% longer than stock 1F1B, and 10.0 GB less on the fullest "
        "rank"
    ]
    assert warned((12, 50e9), (10, 39e9)) == [
        "warning: v-min is predicted to take 10.0% longer than stock interleaved, and 1.0 GB more on the "
        "fullest rank"
    ]


@pytest.mark.parametrize("flags", ["", "--pipeline-vocabulary shared"])
def test_a_log_compares_with_the_estimated_pipeline(flags: str) -> None:
    """The seconds of the schedule in force are those of the estimate that makes it, by the device's rates."""
    job = asked(flags)
    schedule = make(pipeline.read(job, DATA)).schedule
    seconds = AllProducts().pipeline_seconds(job, DATA, schedule, "NVIDIA H100 80GB HBM3")
    assert seconds == pytest.approx(estimated(job).pipeline_seconds)
    assert AllProducts().pipeline_seconds(job, DATA, schedule, "NVIDIA H100 NVL") is None
