"""--pipeline-profile-steps: the schedule changes in the middle of a run, and nothing else does."""

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.utils import unwrap_model

from megatron_pp_ext.compiler.limits import Budget
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.features.guided import megatron
from megatron_pp_ext.features.guided.feature import Guided
from megatron_pp_ext.features.guided.order import ProfileSteps, may_keep
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.runtime import recorder
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from tests.support.clock import TICK, Clock
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.flags import PP4, read
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, train

EQUAL = ("--clip-grad", "0", "--untie-embeddings-and-output-weights", "--train-iters", "6")
PIPELINE = ("--pipeline-model-parallel-size", "4", *EQUAL)
MEASURED = ("--pipeline-profile-steps", "2-3")
SLOW = 0.01
UNEVEN = (1, 5, 2, 6, 1, 3, 1, 1)
"""What the stages take, in milliseconds: costs that no published family was made for."""


@pytest.fixture
def log(said_by: Callable[[ModuleType], Path]) -> Path:
    """The lines that rank 0 logs about the change."""
    return said_by(megatron)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements as of stages that take very different times, so that there is much to gain."""
    measure = megatron.measured_costs

    def measured(steps) -> Costs:
        stages = measure(steps).stages
        return Costs(
            tuple(
                StageCosts(t, t, t, stage.activation, stage.released_by_input_gradient)
                for t, stage in zip(UNEVEN, stages, strict=False)
            )
        )

    monkeypatch.setattr(megatron, "measured_costs", measured)


def test_the_change_leaves_no_trace_in_losses(log: Path, uneven: None, tmp_path: Path) -> None:
    file = tmp_path / "after.json"
    ours = run(4, [*PIPELINE, *MEASURED, "--pipeline-schedule", "v-half", "--pipeline-trace", str(file)])
    assert_same_bits(ours, stock(4, *PIPELINE))
    *_, changed, gained = log.read_text().splitlines()  # a better layout may be advised before
    assert re.search(
        r"m = 8, measured in steps 2-3: predicted \S+ ms with v-half, \S+ ms with the compiled "
        r"schedule \(\d+\.\d% shorter\), which runs from now on",
        changed,
    )
    assert re.search(r"m = 8: measured \S+ ms before and \S+ ms under the compiled", gained)
    assert trace_file.read(file).timeline().schedule.orders != catalog.build("v-half", 4, 8).orders


def slow_last_stage(chunks: list[torch.nn.Module]) -> None:
    """Let layer 8 take time in its forward, and twice as long in its backward; the clocks of ranks differ."""
    initialize_by_layer(chunks)
    clock = recorder.now = Clock(1000.0 * torch.distributed.get_rank())

    def take_time(module: torch.nn.Module, args, output) -> None:
        clock.pass_by(SLOW)
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: clock.pass_by(2 * SLOW))

    for chunk in unwrap_model(chunks):
        for layer in chunk.decoder.layers:
            if layer.layer_number == 8:
                layer.mlp.register_forward_hook(take_time)


def test_what_is_measured_is_what_stages_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slow layer makes its stage cost more in F and in I, not in W, and the other stage nothing."""
    simulate = megatron.simulate

    def keep(schedule: Schedule, costs: Costs) -> Timeline:
        (tmp_path / "costs").write_bytes(pickle.dumps(costs))
        return simulate(schedule, costs)

    monkeypatch.setattr(megatron, "simulate", keep)
    file = tmp_path / "trace.json"
    flags = ("--pipeline-model-parallel-size", "2", "--train-iters", "4", "--pipeline-schedule", "1f1b")
    train(2, [*flags, *MEASURED, "--pipeline-trace", str(file)], initialize=slow_last_stage)
    costs = pickle.loads((tmp_path / "costs").read_bytes())
    first, last = costs.stages
    # Between the readings at its begin and its end an action looks at no clock.
    assert (last.forward, last.input_gradient) == pytest.approx((SLOW, 2 * SLOW), abs=2 * TICK, rel=0)
    assert max(first.forward, first.input_gradient, first.weight_gradient, last.weight_gradient) <= 2 * TICK
    assert 0 < first.released_by_input_gradient < first.activation
    # Equal layers; the last stage keeps the logits, too.
    assert first.activation < last.activation
    assert costs.message == 4 * 32 * 32
    # On one clock, a message and a step take no 1000 seconds, by which the clocks of the ranks differ.
    assert costs.hop < 100
    step = trace_file.read(file)
    assert step.timeline().makespan < 100
    assert [record.clock_error > 0 for record in step.records] == [False, True]


@pytest.mark.wide
def test_a_better_layout_is_advised_for_the_next_start(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss takes as long as four layers, so that the first stage is to have six of eight."""
    took = Costs((StageCosts(4, 4, 4), StageCosts(8, 8, 8)))
    monkeypatch.setattr(megatron, "measured_costs", lambda steps: took)
    flags = ["--pipeline-model-parallel-size", "2", "--train-iters", "4", "--pipeline-schedule", "1f1b"]
    train(2, [*flags, *MEASURED])
    advised, *_ = log.read_text().splitlines()
    found = re.search(
        r"measured in steps 2-3: at the next start --pipeline-model-parallel-layout '(\S+)' makes the "
        r"pipeline (\S+)% shorter by simulation",
        advised,
    )
    assert found and found[1] == "Et*6|t*2L" and float(found[2]) == pytest.approx(25, abs=5)
    log.write_text("")
    monkeypatch.setattr(megatron, "measured_costs", lambda steps: Costs((StageCosts(6, 6, 6),) * 2))
    train(2, [*flags, *MEASURED, "--pipeline-model-parallel-layout", found[1]])
    assert "at the next start" not in log.read_text()


@pytest.mark.wide
def test_ranks_that_share_a_stage_change_together(log: Path, uneven: None) -> None:
    """Only the first pipeline is measured; its costs and limits are those of the other ranks, too."""
    flags = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", *EQUAL[:-1], "4"]
    flags += ["--global-batch-size", "4"]
    assert_same_bits(run(4, [*flags, *MEASURED, "--pipeline-schedule", "auto"]), stock(4, *flags))
    assert "which runs from now on" in log.read_text()


def test_what_a_better_schedule_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the family before it, messages counted; what the user allows; what the device has."""
    schedule = catalog.build("v-half", 4, 8)
    measured = Costs(tuple(StageCosts(1, 1, 1, 10.0 + stage) for stage in range(8)), message=2.0)

    def budget(flags: str) -> Budget:
        source = read(monkeypatch, f"{PP4} --pipeline-schedule {flags}").source
        return may_keep(source, schedule, measured, [1e9, 2e9, 3e9, 4e9])

    assert budget("v-half") == Budget(simulate(schedule, measured).peak_memory)
    assert budget("flex --pipeline-memory-limit 0.5") == Budget((0.5 * 4 * 21,) * 4, holds_messages=False)
    assert budget("flex --pipeline-memory-limit 4e9") == Budget((4e9,) * 4)
    assert budget("flex --pipeline-memory-limit 4e9-3e9-3e9-2e9") == Budget((4e9, 3e9, 3e9, 2e9))
    assert budget("auto") == Budget((1e9, 2e9, 3e9, 4e9))


@pytest.mark.parametrize(
    ("activation", "reason"), first(1, [(100.0, "predicted to take"), (1e9, "memory limit .* is infeasible")])
)
def test_the_old_schedule_stays_unless_another_is_shorter(
    activation: float, reason: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one microbatch there is nothing to gain, and within a limit that is too low nothing at all.

    A V has both ends on one rank: two heavy stages where every rank of 1F1B has one.
    """

    def costs(activation_of_ends: float, steps) -> Costs:
        light, heavy = StageCosts(1, 1, 1, 100.0), StageCosts(1, 1, 1, activation_of_ends)
        return Costs((heavy, *(light,) * (steps[0].placement.stages - 2), heavy))

    flags = ["--pipeline-model-parallel-size", "2", "--train-iters", "4", *MEASURED]
    flags += ["--global-batch-size", "1", "--pipeline-schedule", "flex", "--pipeline-memory-limit", "1.5"]
    monkeypatch.setattr(megatron, "measured_costs", partial(costs, activation))
    train(2, flags)
    (line,) = log.read_text().splitlines()
    assert re.search(f"m = 1, measured in steps 2-3: flex stays, {reason}", line)


def test_the_gain_that_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians for each number of microbatches; before the change without the step that counted bytes."""
    lines: list[str] = []
    monkeypatch.setattr(megatron, "print_rank_0", lines.append)
    durations = megatron._StepDurations()
    for microbatches, seconds in ((8, 0.9), (8, 0.1), (8, 0.1), (8, 0.13), (4, 0.05)):
        durations.add_before(microbatches, seconds)
    durations.wait_for(5)
    durations.wait_for(99)  # another number of microbatches changes later, which starts nothing anew
    for microbatches, seconds in ((8, 0.08), (4, 0.06), (8, 0.3), (2, 0.02), (8, 0.08)):
        assert durations.is_waiting and not lines
        durations.add_after(microbatches, seconds)
    assert not durations.is_waiting
    assert [line.removeprefix("megatron_pp_ext: m = ") for line in lines] == [
        "8: measured 100 ms before and 80 ms under the compiled schedule (20.0% shorter)",
        "4: measured 50 ms before and 60 ms under the compiled schedule (20.0% longer)",
        "2: measured 20 ms under the compiled schedule, and never before it",
    ]


def test_bytes_are_counted_in_the_first_measured_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes time, and the schedule is compiled from the times of the others."""
    counted = {}

    def recording(group, model, forward_only, counting) -> None:
        counted[done + 1] = counting

    monkeypatch.setattr(megatron, "print_rank_0", lambda line: None)
    monkeypatch.setattr(tracing, "recording", recording)
    request = named("1f1b", 2, 8)
    chosen = requested.Pipeline(
        request.with_option(ProfileSteps(2, 4)), Source(request, CostModel(Costs.unit))
    )
    guide = Guided().guide(chosen)
    assert guide is not None
    for done in range(8):
        if done == 6:
            guide._durations.wait_for(1)
        guide.step(SimpleNamespace(group=None, model=[], forward_only=False, training_steps=done))
        guide._measured_steps += 2 <= done + 1 <= 4
        if guide._durations.is_waiting:
            guide._durations.add_after(8, 0.1)
    seconds = tracing.Counting.SECONDS
    # The step behind the measured ones is the first under the new schedule, if there is one.
    assert counted == {
        1: None, 2: tracing.Counting.BYTES, 3: seconds, 4: seconds, 5: seconds, 6: None, 7: seconds, 8: None
    }  # fmt: skip


def test_steps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = read(monkeypatch, f"{PP4} --pipeline-schedule v-half --pipeline-profile-steps 1-2")
    steps = pipeline.request.option(ProfileSteps)
    assert steps == ProfileSteps(1, 2) and steps.number == 2
    assert [step in steps for step in range(4)] == [False, True, True, False]
