"""A schedule with both ends on the last rank is that with both on the first, its ranks counted in reverse."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.compiler.limits import Budget, InfeasibleLimit, at_most, least_limits
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, evaluation, named
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.features.pairs.order import request_in_pairs
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Orders, Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import CostModel, Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.formats import csv_file, trace_file
from megatron_pp_ext.schedule.launch_order import launch_order
from megatron_pp_ext.schedule.messages import Arrival, Launch, planned_launches
from megatron_pp_ext.schedule.placement import FIRST, LAST, Placement, Shape, linear, loop, v, wave
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.schedule.simulate import Timeline, simulate

FOLDED = tuple(name for name, entry in catalog.ENTRIES.items() if entry.placement(2).folds)
PAIRED = tuple(name for name in FOLDED if catalog.ENTRIES[name].make_paired)


def costs_of(stages: int) -> Costs:
    """Return costs that differ from stage to stage, with messages that take time and memory."""
    return Costs(
        tuple(StageCosts(3 + s % 3, 4 + s % 2, 2 + s % 5, 1.0 + s / 8) for s in range(stages)),
        hop=0.5,
        message=0.25,
        head=HeadCosts(1.0, 0.5, 0.125),
    )


def both(request: Request) -> tuple[Timeline, Timeline]:
    """Return the steps with the ends on the first and on the last rank."""
    first, last = (
        make(request.with_loss_on(rank), CostModel(lambda placement: costs_of(placement.stages))).schedule
        for rank in (FIRST, LAST)
    )
    check(last)
    return simulate(first, costs_of(first.placement.stages)), simulate(last, costs_of(last.placement.stages))


@pytest.mark.parametrize("name", FOLDED)
@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(2, 6),
    microbatches=st.integers(1, 12),
    splits_head=st.booleans(),
    offload=st.sampled_from([None, 0.5]),
)
def test_the_same_schedule(
    name: str, ranks: int, microbatches: int, splits_head: bool, offload: float | None
) -> None:
    try:
        request = replace(named(name, ranks, microbatches), splits_head=splits_head)
        first, last = both(request if offload is None else request.with_option(OffloadRequest(offload)))
    except ValueError:  # the family has no schedule for these sizes
        return
    assert last.schedule.placement == first.schedule.placement.turned_over
    assert last.schedule.orders == first.schedule.orders[::-1]
    assert last.schedule.copies == first.schedule.copies
    assert last.schedule.digest != first.schedule.digest
    assert last.makespan == first.makespan
    assert last.peak_memory == first.peak_memory[::-1]
    assert last.peak_messages == first.peak_messages[::-1]


@pytest.mark.parametrize("name", PAIRED)
def test_pairs(name: str) -> None:
    first, last = both(request_in_pairs(named(name, 4, 12)))
    assert last.schedule.paired == first.schedule.paired
    assert (last.makespan, last.peak_memory) == (first.makespan, first.peak_memory[::-1])


def _planned(schedule: Schedule) -> list[list[tuple[Launch, ...]]]:
    return planned_launches(Orders.of(schedule))


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("splits_head", [False, True])
def test_the_same_launches(name: str, splits_head: bool) -> None:
    """Also where actions end at the same time: ranks differ in their numbers alone."""
    first, last = (one.schedule for one in both(replace(named(name, 4, 9), splits_head=splits_head)))
    before, after = (launch_order(Orders.of(one)) for one in (first, last))
    assert after == [(end, 3 - rank, action) for end, rank, action in before]
    planned = [_planned(one) for one in (first, last)]
    turned = [
        [
            tuple(one._replace(peer=3 - one.peer) if isinstance(one, Arrival) else one for one in here)
            for here in order
        ]
        for order in planned[0][::-1]
    ]
    assert planned[1] == turned
    counts = [[len(plan_rank(one, rank).operations) for rank in range(4)] for one in (first, last)]
    assert counts[1] == counts[0][::-1]


@pytest.mark.parametrize("name", FOLDED)
def test_evaluations(name: str) -> None:
    request = evaluation(named(name, 4, 3).placement, 3)
    first, last = (make(request.with_loss_on(rank)).schedule for rank in (FIRST, LAST))
    assert last.orders == first.orders[::-1]


@pytest.mark.parametrize("limits", [(0.9, 0.7, 0.5), (0.5, 0.7, 0.9)])
def test_limits_are_those_of_the_ranks(limits: tuple[float, ...]) -> None:
    """Compiled for a V alone, the turned one is that for the limits counted from the other end."""
    request = named("flex", 3, 6, limit=limits)
    request = replace(request, placements=tuple(one for one in request.placements if one.folds), trials=50)
    first, _ = both(replace(request, limit=limits[::-1]))
    _, last = both(request)
    assert last.schedule.orders == first.schedule.orders[::-1]
    with pytest.raises(InfeasibleLimit, match="of rank 2 is infeasible"):
        both(replace(request, limit=(0.9, 0.7, 0.01)))


def test_among_several_placements_each_has_the_limits_of_its_ranks() -> None:
    """A loop keeps its ranks where a V is turned over: here no other placement keeps the limits."""
    costs, limits = costs_of(6), least_limits(costs_of(6), loop(3, 2))
    request = replace(named("flex", 3, 6, limit=1.0), trials=50).with_loss_on(LAST)
    made = make(replace(request, limit=Budget(limits)), CostModel.fixed(costs))
    assert made.schedule.placement == loop(3, 2)
    timeline = simulate(made.schedule, costs)
    assert all(map(at_most, timeline.peak_memory, limits))
    assert made.lower_bound is not None and made.lower_bound <= timeline.makespan
    with pytest.raises(InfeasibleLimit, match="of rank 2 is infeasible"):
        make(replace(request, limit=(2.0, 2.0, 0.01)), CostModel.fixed(costs))


def test_a_placement_and_its_mirror() -> None:
    for placement in (v(4), wave(3, 4), replace(v(2), splits_head=True)):
        turned, last = placement.with_loss_on(LAST), placement.ranks - 1
        assert turned.with_loss_on(FIRST) == turned.turned_over == placement
        assert {turned.rank_of(0), turned.rank_of(turned.stages - 1)} == {last}
        for rank in range(placement.ranks):
            assert turned.stages_of(rank) == placement.stages_of(last - rank)
            assert [turned.stage_of(rank, chunk) for chunk in range(turned.chunks)] == list(
                turned.stages_of(rank)
            )
    assert v(4).with_loss_on(LAST).stages_of(3) == (0, 7)


@pytest.mark.parametrize("placement", [linear(3), loop(3, 2), wave(3, 3)])
def test_ends_on_two_ranks_stay_there(placement: Placement) -> None:
    assert placement.with_loss_on(LAST) == placement.with_loss_on(FIRST) == placement
    with pytest.raises(ValueError, match="has embedding and head on two ranks"):
        replace(placement, ends_on_last=True)


@pytest.mark.parametrize("splits_head", [False, True])
def test_files_keep_it(tmp_path: Path, splits_head: bool) -> None:
    request = replace(named("v-half", 3, 4), splits_head=splits_head).with_loss_on(LAST)
    schedule = make(request).schedule
    csv_file.write(schedule, tmp_path / "v-half.csv")
    assert csv_file.read(tmp_path / "v-half.csv") == schedule
    timeline = simulate(schedule, costs_of(6))
    trace_file.write_timeline(tmp_path / "trace.json", timeline)
    step: RecordedStep = trace_file.read(tmp_path / "trace.json")
    assert step.placement == schedule.placement


def test_a_wave_of_four_chunks_as_a_file(tmp_path: Path) -> None:
    request = evaluation(Placement(Shape.WAVE, 2, 4, ends_on_last=True), 3)
    schedule = make(request).schedule
    csv_file.write(schedule, tmp_path / "forwards.csv")
    assert csv_file.read(tmp_path / "forwards.csv").placement == schedule.placement
