"""Published ratios between schedules (docs/ratios.md): their data, and what is predicted of them."""

from statistics import mean

import pytest

from benchmarks.planner.ratios import ZERO_BUBBLE, ratios
from benchmarks.planner.schedule_steps import (
    bubble,
    crosspipe_scale,
    crosspipe_seconds,
    planned_seconds,
    planned_with_action,
    profiled_seconds,
    with_action,
)
from reference.schedule_ratios import profiles, steps, tables

ROWS = {
    "zero-bubble-4": 48, "zero-bubble-5": 72, "zero-bubble-6": 36, "zero-bubble-12": 18,
    "crosspipe-5": 70, "vocabulary": 40, "olmo-core-10": 2,
}  # fmt: skip
GOAL, MEAN = 0.03, 0.02


def test_each_row_is_there_once_and_has_a_time() -> None:
    assert {table: len(steps(table)) for table in tables()} == ROWS
    for table in tables():
        assert len({(step.job, step.schedule) for step in steps(table)}) == ROWS[table], table
        assert all(step.seconds > 0 for step in steps(table) if step.metric != "bubble")


@pytest.mark.parametrize("table", ["zero-bubble-4", "zero-bubble-12"])
def test_no_step_is_shorter_than_the_work_of_a_stage(table: str) -> None:
    """Throughputs are printed with three digits, or with two: a step of more than a second is known to 1%."""
    for step in steps(table):
        counts = [count for model, count in profiles() if model == step.model]
        near = profiles()[step.model, min(counts, key=lambda count: abs(count - step.microbatches))]
        work = near.forward + near.input_gradient + near.weight_gradient
        assert step.seconds > 0.99 * step.microbatches * work


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZB-H2"])
def test_bubbles_that_authors_computed(schedule: str) -> None:
    """They are printed with four digits."""
    rows = [step for step in steps("zero-bubble-5") if step.schedule == schedule and step.ranks == 8]
    assert len(rows) == 6
    for step in rows:
        assert bubble(step) == pytest.approx(step.value, abs=5.1e-5)


def test_a_v_loses_over_a_slow_link_where_it_was_measured_to() -> None:
    """It wins up to a delay of 0.5 F and loses from 2.25 on, where ranks wait for what they send."""
    every = [ratio for ratio in ratios("crosspipe-5") if ratio.step.schedule == "ZB-V"]
    assert {ratio.measured > 1 for ratio in every} == {True, False}
    for ratio in every:
        predicted = ratio.predicted(lambda step: crosspipe_seconds(step, True, crosspipe_scale()))
        assert (predicted > 1) == (ratio.measured > 1), ratio.step
    meanwhile = [ratio.predicted(lambda step: crosspipe_seconds(step, False)) for ratio in every]
    assert any((each > 1) != (ratio.measured > 1) for each, ratio in zip(meanwhile, every, strict=True))


def test_steps_over_a_slow_link() -> None:
    """With the longest F as published, 1F1B and ZB-H1 are within the goal, and ZB-V within 7%."""
    for step in steps("crosspipe-5"):
        if step.schedule in ("1F1B", "ZB-H1", "ZB-V"):
            found = crosspipe_seconds(step, True, crosspipe_scale())
            assert found == pytest.approx(step.seconds, rel=0.07 if step.schedule == "ZB-V" else GOAL)


def test_zero_bubble_by_sizes_alone() -> None:
    for ratio in ratios("zero-bubble-4"):
        if (ratio.step.schedule, ratio.step.ranks) == ("ZB-1p", 8):
            assert abs(ratio.error(planned_seconds)) < GOAL, ratio.step


@pytest.mark.wide
def test_all_ratios_of_zero_bubble() -> None:
    """With the constant of an action, which is fitted without the model that is predicted."""
    every = [ratio for name in ZERO_BUBBLE for ratio in ratios(name)]
    errors = [abs(ratio.error(with_action)) for ratio in every]
    assert mean(errors) < MEAN < mean(abs(ratio.error(profiled_seconds)) for ratio in every)
    assert max(errors) < 0.05
    assert sum(error < GOAL for error in errors) > 0.85 * len(errors)


@pytest.mark.wide
def test_ratios_by_sizes_and_the_constant() -> None:
    """The schedules are those whose order and flush are ours, which ZB-2p's are not."""
    every = [ratio for ratio in ratios("zero-bubble-4") if ratio.step.schedule != "ZB-2p"]
    errors = [abs(ratio.error(planned_with_action)) for ratio in every]
    assert max(errors) < GOAL
    assert mean(errors) < MEAN < mean(abs(ratio.error(planned_seconds)) for ratio in every)
