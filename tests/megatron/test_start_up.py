"""What rank 0 prints before the first step, and what runners know of a run beside its schedule."""

from types import SimpleNamespace

import pytest

from megatron_pp_ext import launch
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.costs import system
from megatron_pp_ext.job import pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron import requested, start_up
from megatron_pp_ext.megatron.by_call import read as called
from megatron_pp_ext.megatron.requested import Pipeline, Settings
from megatron_pp_ext.megatron.runners import choose
from megatron_pp_ext.megatron.start_up import caveat, estimate, settings
from megatron_pp_ext.megatron.trainer import validation
from megatron_pp_ext.pipedream import flush_free
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement
from tests.support.flags import PP4, arguments, requested_by
from tests.support.training import train


def summary(flags: str, monkeypatch: pytest.MonkeyPatch, costs=None) -> str:
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} {flags}")
    pipeline = requested_by(args)
    assert pipeline is not None
    return start_up.summary(pipeline, CostModel(costs) if costs else estimate(RequestedJob.of_args(args)))


def unit(placement: Placement) -> Costs:
    return Costs.unit(placement)


def unknown(placement: Placement) -> Costs:
    raise ValueError("a layer that nobody has modelled")


def faulty(placement: Placement) -> Costs:
    raise KeyError("a fault of the estimate")


def test_the_line_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "v-half: 4 ranks x 2 chunks, m = 8, peak 3 microbatches, predicted bubble 9.4% at unit costs"
    assert summary("--pipeline-schedule V_Half", monkeypatch, unit) == line
    assert summary("--pipeline-schedule v-half", monkeypatch, unknown) == line
    with pytest.raises(KeyError):
        summary("--pipeline-schedule v-half", monkeypatch, faulty)
    # By the model's own estimate the output layer makes the last stage longer than the others.
    estimated = summary("--pipeline-schedule v-half", monkeypatch)
    assert estimated.startswith("v-half: 4 ranks x 2 chunks, m = 8, peak 3 microbatches, predicted bubble 1")
    assert "unit costs" not in estimated


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pipeline-trace x.json", ("Megatron's own 1f1b: 4 ranks x 1 chunk, m = 8, peak 4 ",)),
        ("--pipeline-schedule flex --pipeline-memory-limit 0.5", ("flex: 4 ranks x ", "predicted bubble ")),
        ("--pipeline-schedule auto", ("auto: 4 ranks x ", " in the first step, then ")),
        (
            "--pipeline-schedule pipedream --pipeline-update-interval 8 "
            "--untie-embeddings-and-output-weights",
            ("pipedream: 4 ranks x 1 chunk, an update every 8 microbatches, peak 4 ", "no bubble between"),
        ),
        ("--pipeline-schedule zb-h1 --pipeline-profile-steps 1-2", ("%, until steps 1-2 are measured",)),
    ],
)
def test_the_lines_of_others(flags: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    line = summary(flags, monkeypatch)
    assert all(word in line for word in words), line
    assert "\n" not in line


LARGE = (
    "--pipeline-schedule v-half --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 16384 "
    "--vocab-size 128000 --num-layers 16 --seq-length 4096 --max-position-embeddings 4096"
)


def test_megatrons_own_schedules_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the planner estimates for a job on GPUs; a fault of it leaves the line out."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(requested, "_loaded", requested.Products())
    asked = RequestedJob.of_args(arguments(f"{PP4} {LARGE}")).with_arguments(distributed_backend="nccl")
    assert start_up.comparison(asked, 1) == []
    requested.use(launch.AllProducts())
    (line,) = start_up.comparison(asked, 1)
    machine = system.read("h100")
    for given, name in (
        ({"pipeline_schedule": "v-half"}, "By the rates of an H100, v-half"),
        ({"pipeline_schedule": None}, "stock 1F1B"),
        ({"pipeline_vocabulary": "auto"}, "with --pipeline-vocabulary auto"),
    ):
        one = asked.with_arguments(**given)
        step = estimate_request(one, machine, pipeline.read(one, 1))
        assert f"{name}: {step.step_seconds:.4g} s, {step.fullest.total / 1e9:.1f} GB" in line
    assert "stock interleaved, " in line and "\n" not in line
    assert start_up.comparison(asked.with_arguments(pipeline_schedule="1f1b"), 1) == []
    assert start_up.comparison(asked.with_arguments(hidden_size=None), 1) == []
    assert start_up.comparison(asked.with_arguments(distributed_backend="gloo"), 1) == []


def test_the_line_of_a_call_with_costs() -> None:
    """By the closed forms of docs/schedules.md: V-Half takes 26.5, 1F1B 33 and interleaved 28.5."""

    def line(schedule: str, **about) -> str:
        return str(called(schedule, ranks=4, microbatches=8, **about).pipeline()[1])

    words = f"{1 - 26.5 / 33:.1%} less time than stock 1F1B and {3 / 4:.2f} of its activations, "
    words += f"{1 - 26.5 / 28.5:.1%} less time than stock interleaved and {3 / 5.5:.2f} of its activations"
    assert line("v-half", costs=[1.0] * 8).endswith(f"; by these costs {words}")
    for about in ({}, {"costs": [1.0] * 4}):
        assert "by these costs" not in line("1f1b", **about)
    assert "by these costs" not in line("v-half")


DROPOUT = "--attention-dropout 0.1"


@pytest.mark.parametrize(
    ("flags", "iteration", "start"),
    [
        ("--pipeline-schedule v-half", 0, "Initial weights follow "),
        (f"--pipeline-schedule v-half {DROPOUT}", 0, "Initial weights and dropout follow "),
        (f"--pipeline-schedule v-half {DROPOUT} --pipeline-layer-seeds", 0, "Dropout follows "),
        ("--pipeline-schedule v-half --hidden-dropout 0.1", 7, "Dropout follows "),
        ("--pipeline-schedule v-half --pretrained-checkpoint x", 0, ""),
        ("--pipeline-schedule v-half --load x", 0, "Initial weights follow "),
        ("--pipeline-schedule v-half --load x --finetune", 0, ""),
        ("--pipeline-schedule v-half", 7, ""),
        (f"--pipeline-schedule zb-h1 {DROPOUT}", 0, ""),
    ],
)
def test_what_follows_the_placement(
    flags: str, iteration: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = told(flags, iteration, monkeypatch)
    assert said.startswith(start) and bool(said) == bool(start)
    assert ("--pipeline-layer-seeds" in said) == ("nitial weights" in said)


def told(flags: str, iteration: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} {flags}")
    pipeline = requested_by(args)
    assert pipeline is not None
    args.iteration = iteration
    return caveat(pipeline, args)


@pytest.mark.parametrize(
    ("flags", "measured_by"),
    [
        (f"v-half --pipeline-profile-steps 1-2 {DROPOUT}", "--pipeline-profile-steps 1-2"),
        (f"auto {DROPOUT}", "--pipeline-schedule auto"),
        ("auto", None),
        (f"zb-h1 --pipeline-profile-steps 1-2 {DROPOUT}", None),
        (f"v-half {DROPOUT}", None),
    ],
)
def test_dropout_follows_the_order_that_goes_by_measurements(
    flags: str, measured_by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks a rank: with one, every schedule takes its microbatches forward in one order."""
    *_, last = told(f"--pipeline-schedule {flags}", 7, monkeypatch).split("\n")
    if measured_by is not None:
        assert last.startswith(f"Under {measured_by} ") and "losses change with the schedule" in last
    else:
        assert "losses change" not in last


def test_rank_0_prints_them_once(said_by) -> None:
    """However many steps and evaluations there are."""
    said = said_by(choose)
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half"]
    train(2, [*flags, "--eval-iters", "1", "--eval-interval", "1"])
    first, *rest = said.read_text().splitlines()
    assert first.startswith("v-half: 2 ranks x 2 chunks, m = 8, peak ")
    assert rest[0].startswith("Initial weights follow ")
    assert len(rest) == 2


def test_a_job_on_gpus_logs_stocks_figures(said_by, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first line; the job runs here, and only the comparison takes it for one on GPUs."""

    def on_gpus(asked: RequestedJob, data: int) -> list[str]:
        return start_up.comparison(asked.with_arguments(distributed_backend="nccl"), data)

    monkeypatch.setattr(validation, "comparison", on_gpus)
    said = said_by(choose)
    train(2, ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half"])
    first, second, *_ = said.read_text().splitlines()
    assert first.startswith("v-half: 2 ranks x 2 chunks, m = 8, peak ")
    assert second.startswith("By the rates of an H100, v-half: ") and "; stock 1F1B: " in second


THIRD = SimpleNamespace(training_steps=2)
"""A step behind two that the runner ran itself."""


def test_what_megatron_settles_later_is_read_when_it_is_needed() -> None:
    """A run that resumes at step 40 has run it for the first time; --train-samples become steps at last."""
    args = arguments(f"{PP4} --train-iters 3")
    known = settings(args, RequestedJob.of_args(args), Pipeline(named("v-half", 4, 8)))
    assert known.steps_done(0) == 0
    args.curr_iteration, args.train_iters = 42, 50
    assert known.steps_done(2) == 42
    assert flush_free.steps_to_come(known, THIRD) == 8


def test_a_loop_that_says_nothing_leaves_the_count_to_the_runner() -> None:
    assert Settings().steps_done(2) == 2
    assert flush_free.steps_to_come(Settings(train_steps=lambda: 10), THIRD) == 8
    with pytest.raises(ValueError, match=r"^train_steps is not given, but .*; give the number of steps, or "):
        flush_free.steps_to_come(Settings(), THIRD)
