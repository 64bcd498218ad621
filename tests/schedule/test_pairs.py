"""Pairs: a forward and a backward that run together, as part of a schedule."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Orders, Schedule, together
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer
from tests.support import slow
from tests.support.receives import posted_receives

NAMES = [name for name, entry in catalog.ENTRIES.items() if entry.make_paired]
SIZES = [(2, 1), (2, 4), (3, 3), (3, 7), (4, 6), (5, 4), (5, 11), (8, 16)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_families(name: str, ranks: int, microbatches: int) -> None:
    """Pairs do the same work, in each a forward meets a backward of another microbatch.

    Starts, ends and idle time are those of an independent calculation, in whole numbers to the last bit.
    """
    plain = catalog.build(name, ranks, microbatches)
    schedule = catalog.build(name, ranks, microbatches, paired=True)
    for order, other in zip(schedule.orders, plain.orders, strict=True):
        assert sorted(order) == sorted(other)
        for group in together(order, schedule.paired):
            if len(group) == 2:
                forward, backward = group
                assert forward.kind is Kind.F
                assert backward.kind in (Kind.I, Kind.B)
                assert forward.microbatch > backward.microbatch
    assert schedule.paired or microbatches < 2 * ranks
    if schedule.paired:
        assert schedule.digest != replace(schedule, paired=frozenset()).digest
    stages = tuple(StageCosts(4 + s % 3 * 4, 8 + s % 2 * 4, 4) for s in range(schedule.placement.stages))
    for pair in (0.5, 0.75, 1.0):
        costs = Costs(stages, hop=2, pair=pair)
        timeline, timer = simulate(schedule, costs), ScheduleTimer(schedule)
        found = {event.action: event.start for events in timeline.events for event in events}
        assert found == slow.starts(schedule, costs)
        busy = 0.0
        for events, order in zip(timeline.events, schedule.orders, strict=True):
            ends = {event.action: event.end for event in events}
            for group in together(order, schedule.paired):
                assert len({(found[a], ends[a]) for a in group}) == 1
                busy += ends[group[0]] - found[group[0]]
        assert timeline.bubble == pytest.approx(1 - busy / (ranks * timeline.makespan))
        assert sum(span.busy for span in timer.spans(costs)) == pytest.approx(busy)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_critical_path_bounds_the_makespan_with_other_stages(data) -> None:
    """It adds up to the makespan but for messages, and to no more than that with any other stages."""
    name = data.draw(st.sampled_from(NAMES))
    schedule = catalog.build(name, data.draw(st.integers(2, 5)), data.draw(st.integers(1, 12)), paired=True)
    pair = data.draw(st.sampled_from([0.5, 0.75, 1.0]))
    hidden = st.integers(0, 3).map(float)
    stage = st.builds(StageCosts, *[st.integers(4, 6).map(float)] * 3, hidden=hidden)
    drawn = st.lists(stage, min_size=schedule.placement.stages, max_size=schedule.placement.stages)
    here, other = (Costs(tuple(data.draw(drawn)), hop=1.0, pair=pair) for _ in range(2))
    timer = ScheduleTimer(schedule)
    path = timer.critical_path(here)
    assert path.makespan == timer.makespan(here.seconds, here)

    def added(costs: Costs) -> float:
        return sum(
            f * one.forward + i * one.input_gradient + w * one.weight_gradient - b * one.hidden
            for (f, i, w, b), one in zip(path.work, costs.stages, strict=True)
        )

    assert added(here) <= path.makespan
    assert added(other) <= timer.makespan(other.seconds, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16), (8, 32)])
def test_makespan_and_memory(name: str, ranks: int, microbatches: int) -> None:
    """A shorter pair never lengthens the step; peaks are those that the families promise."""
    plain = catalog.build(name, ranks, microbatches)
    schedule = catalog.build(name, ranks, microbatches, paired=True)
    unit = Costs.unit(schedule.placement)
    made = [simulate(schedule, replace(unit, pair=pair)).makespan for pair in (1.0, 0.9, 0.8, 0.7)]
    assert made == sorted(made, reverse=True)
    assert len(set(made)) == len(made)
    before, after = (max(simulate(one, unit).peak_activations) for one in (plain, schedule))
    assert after == {"1f1b": 2 * ranks, "interleaved": before + 1, "dualpipe-v": before}[name]


def test_one_warm_up_forward_more_is_too_few_without_chunks() -> None:
    """1F1B with pairs begins with twice the distance to the last rank: half of it would halve the speed."""
    schedule = catalog.build("1f1b", 4, 40, paired=True)
    costs = Costs.unit(schedule.placement)
    period = 3.0
    assert simulate(schedule, costs).makespan < 1.5 * period * 40

    def order(rank: int) -> tuple[Action, ...]:
        warm_up = 4 - rank
        forwards, backwards = ([Action(rank, kind, m) for m in range(40)] for kind in (Kind.F, Kind.B))
        steady = [a for both in zip(forwards[warm_up:], backwards, strict=False) for a in both]
        return (*forwards[:warm_up], *steady, *backwards[40 - warm_up :])

    paired = frozenset(Action(rank, Kind.F, m) for rank in range(4) for m in range(4 - rank, 40))
    short = Schedule("short", linear(4), 40, tuple(map(order, range(4))), paired)
    check(short)
    assert simulate(short, costs).makespan > 1.8 * period * 40


@pytest.mark.parametrize("name", NAMES)
def test_files(name: str, tmp_path) -> None:
    """There and back, and torch reads the same cells."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for ranks, microbatches in ((2, 5), (3, 7), (4, 8)):
        schedule = catalog.build(name, ranks, microbatches, paired=True)
        path = tmp_path / f"{name}.csv"
        csv_file.write(schedule, path)
        assert csv_file.read(path) == schedule
        rows = [line.split(",") for line in path.read_text().splitlines()]
        for row, order in zip(rows, schedule.orders, strict=True):
            read = [schedules._Action.from_str(cell) for cell in row]
            assert [str(action) for action in read] == row
            groups = [tuple(map(str, action.sub_actions or (action,))) for action in read]
            assert groups == [tuple(map(str, group)) for group in together(order, schedule.paired)]


def test_a_file_may_name_the_backward_first(tmp_path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    schedule = csv_file.read(path)
    assert schedule.paired == {Action(0, Kind.F, 1)}
    assert " ".join(map(str, schedule.orders[0])) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n(1F0;1B0)OVERLAP_F_B,1F1,1B1\n", "rank 1: 1B0 waits for 1F0"),
        (
            "0F0,(0F1;0F2)OVERLAP_F_B,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
            "a pair is an F with an I or a B",
        ),
        ("0F0,(0B0;0W1)OVERLAP_F_B,0F1,0I1\n1F0,1B0,1F1,1B1\n", "a pair is an F with an I or a B"),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", "deadlock"),
    ],
)
def test_refusals(rows: str, message: str, tmp_path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(rows)
    with pytest.raises(InvalidSchedule, match=message) as error:
        csv_file.read(path)
    assert "\n" not in str(error.value)


def test_schedules_without_pairs_name_those_that_have_them() -> None:
    with pytest.raises(ValueError, match=r"v-half.*1f1b, interleaved, dualpipe-v"):
        catalog.build("v-half", 4, 8, paired=True)
    with pytest.raises(InvalidSchedule, match="leave one of the two out"):
        check(share(lambda count: catalog.build("dualpipe-v", 4, count, paired=True), 8))
    plain = catalog.build("1f1b", 2, 4)
    with pytest.raises(InvalidSchedule, match="no rank does it"):
        check(replace(plain, paired=frozenset({Action(1, Kind.F, 9)})))
    for pair in (0.4, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"Costs\.pair"):
            replace(Costs.unit(linear(2)), pair=pair)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 6), st.integers(1, 14))
def test_nothing_is_launched_within_a_pair(name: str, ranks: int, microbatches: int) -> None:
    schedule = catalog.build(name, ranks, microbatches, paired=True)
    posted = posted_receives(Orders.of(schedule))
    for order, of_rank in zip(schedule.orders, posted, strict=True):
        behind = [place + 1 for place, action in enumerate(order) if action in schedule.paired]
        assert not any(of_rank[place] for place in behind)
