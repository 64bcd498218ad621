"""Schedules whose ranks share the vocabulary: valid, short, and with one microbatch more at most."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from megatron_pp_ext.compiler.bounds import lower_bound
from megatron_pp_ext.features.offload.copies import with_share
from megatron_pp_ext.features.vocabulary.share import share, share_evaluation, without_weight_gradients
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Orders, Schedule
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.formats import costs_file, csv_file, trace_file
from megatron_pp_ext.schedule.messages import Exchange, Exchanged, planned_launches
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from tests.support.random_orders import random_schedule

KEPT = 0.25
"""The size of a rank's logits of a microbatch, in those of all activations of a stage."""

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, p, 3 * p)]


def shared(name: str, ranks: int, microbatches: int) -> Schedule:
    return share(lambda count: catalog.build(name, ranks, count), microbatches)


def part(kind: Kind, rank: int = 0, microbatch: int = 0) -> Action:
    return Action(rank, kind, microbatch)


def of_model(schedule, layers=32, hidden=4096, sequence=4096, rows=131072):
    """The costs of a GPT in products alone, times in layers' forwards: [ZB] section 2 has the formulas.

    The output layer is in the vocabulary where the schedule shares it, and in the last stage elsewhere.
    """
    placement = schedule.placement
    forward = hidden * (24 * hidden + 4 * sequence)
    layer = (1.0, hidden * (24 * hidden + 8 * sequence) / forward, 24 * hidden * hidden / forward)
    output = 2 * hidden * rows / forward
    count = layers / placement.stages
    stages = [StageCosts(*(count * time for time in layer))] * placement.stages
    hop = 0.05 * layers / placement.ranks
    if placement.splits_head:
        share_of_rank = output / placement.ranks
        vocabulary = HeadCosts(2 * share_of_rank, share_of_rank, KEPT, hop, 2 * hop)
        return Costs(tuple(stages), hop, head=vocabulary)
    stages[-1] = StageCosts(*(count * time + output for time in layer))
    return Costs(tuple(stages), hop)


def against_perfect(timeline: Timeline) -> float:
    """The makespan as a multiple of a rank's part of all work."""
    work = sum(timeline.costs.seconds(action) for action in timeline.schedule)
    return timeline.makespan / (work / timeline.schedule.ranks)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_every_family_shares(name: str) -> None:
    """It keeps one microbatch more at most, and is no longer than with the vocabulary at its ends alone."""
    for ranks, microbatches in SIZES:
        schedule, alone = shared(name, ranks, microbatches), catalog.build(name, ranks, microbatches)
        check(schedule)
        assert schedule.placement.splits_head and schedule.name == name
        halved = alone.with_halved_backwards
        for rank, order in enumerate(schedule.with_halved_backwards.orders):
            counts = Counter(order)
            assert set(counts.values()) == {1}
            assert {action for action in counts if action.kind in OF_STAGES} == set(halved.orders[rank])
            assert {action for action in counts if action.kind not in OF_STAGES} == {
                part(kind, rank, m) for kind in (Kind.S, Kind.T) for m in range(microbatches)
            }
        ours, theirs = simulate(schedule, of_model(schedule)), simulate(alone, of_model(alone))
        assert max(ours.peak_microbatches) <= max(theirs.peak_microbatches) + 1 + 4 * KEPT
        if microbatches == 3 * ranks >= 12:
            assert against_perfect(ours) < against_perfect(theirs), ranks
        bound = lower_bound(schedule.placement, microbatches, ours.costs, ours.peak_activations)
        assert against_perfect(ours) * 0.5 < bound <= ours.makespan * (1 + 1e-12)


@pytest.mark.parametrize("placement", [linear(3), loop(3, 2), v(3), wave(2, 4)])
def test_any_valid_order_can_be_shared(placement) -> None:
    """Backwards of random orders are put off by forwards alone, or not at all."""
    for seed in range(12):
        turn = ("", "F", "FI")[seed % 3]
        check(share(lambda m, seed=seed, turn=turn: random_schedule(Random(seed), placement, m, turn), 4))


def test_what_waits_for_what() -> None:
    """S for the hidden state, the last backward for every S and their sums, T for the loss."""
    schedule = shared("v-half", 4, 9)
    costs = of_model(schedule)
    assert costs.head is not None
    times = {event.action: event for row in simulate(schedule, costs).events for event in row}
    last = schedule.placement.stages - 1
    for m in range(9):
        hidden, backward = times[Action(last, Kind.F, m)], times[Action(last, Kind.I, m)]
        for rank in range(4):
            wire = costs.head.hidden if rank else 0
            assert times[part(Kind.S, rank, m)].start >= hidden.end + wire
            assert times[part(Kind.T, rank, m)].start >= backward.end + (costs.hop if rank else 0)
            away = costs.head.sums if rank else 0
            assert backward.start >= times[part(Kind.S, rank, m)].end + away


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half", "gpipe"])
def test_all_ranks_launch_the_exchanges_in_one_order_each_before_it_is_needed(name: str) -> None:
    schedule = shared(name, 3, 5)
    placement = schedule.placement
    last, home = placement.stages - 1, placement.rank_of(placement.stages - 1)
    planned = planned_launches(Orders.of(schedule))
    of_ranks = []
    for rank, order in enumerate(schedule.orders):
        launched: list[Exchange] = []
        for action, launches in zip(order, planned[rank], strict=False):
            launched += [one for one in launches if isinstance(one, Exchange)]
            done = {what for what, microbatch in launched if microbatch == action.microbatch}
            looked_up = {Exchanged.TOKENS, Exchanged.EMBEDDED}
            if action.kind is Kind.S:
                assert done == looked_up | {Exchanged.HIDDEN}
            elif action.kind is Kind.T:
                assert done >= set(Exchanged) - {Exchanged.INPUT}
            elif rank == home and action.stage == last and action.kind in (Kind.I, Kind.B):
                assert done == set(Exchanged) - {Exchanged.LOSS, Exchanged.INPUT}
            elif rank == 0 and action.stage == 0 and action.kind is Kind.F:
                assert done == looked_up
                following = {what for what, microbatch in launched if microbatch == action.microbatch + 1}
                assert following == (looked_up if action.microbatch + 1 < 5 else set())
        launched += [one for one in planned[rank][-1] if isinstance(one, Exchange)]
        of_ranks.append(launched)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert sorted(of_ranks[0]) == sorted(Exchange(what, m) for what in Exchanged for m in range(5))


def test_memory_holds_what_is_kept_between_s_and_t() -> None:
    schedule, stages = shared("1f1b", 2, 4), (StageCosts(1, 1, 1, activation=1.0),) * 2
    plain, most = (
        simulate(schedule, Costs(stages, head=HeadCosts(0.5, 0.25, kept))).peak_activations
        for kept in (0.0, 10.0)
    )
    assert all(less + 10 <= more <= less + 30 for less, more in zip(plain, most, strict=True))


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "v-min"])
def test_evaluations_compute_the_logits_alone(name: str) -> None:
    schedule = share_evaluation(catalog.forward_only(catalog.entry(name).placement(4), 5))
    check(schedule)
    assert {action.kind for action in schedule} == {Kind.F, Kind.S}


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_a_frozen_output_layer_has_no_weight_gradients(name: str) -> None:
    schedule = shared(name, 3, 5)
    frozen = without_weight_gradients(schedule)
    check(frozen)
    assert list(frozen) == [action for action in schedule if action.kind is not Kind.T]


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_copies_stay_where_the_weight_gradients_of_a_frozen_output_layer_were(name: str) -> None:
    schedule = shared(name, 4, 7)
    costs = Costs.unit(schedule.placement).copied_at(0.5)
    copied = with_share(schedule, costs, 1).schedule
    moved = copied.copies.reloads | copied.copies.frees
    assert any(action.kind is Kind.T for action in moved.values())
    frozen = without_weight_gradients(copied)
    check(frozen)
    assert frozen.copies.reloads.keys() == copied.copies.reloads.keys()
    assert simulate(frozen, costs).makespan <= simulate(copied, costs).makespan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: [a for a in order if a != part(Kind.S)], r"rank 0: 0S0 is missing"),
        (lambda order: [a for a in order if a != part(Kind.T)], r"rank 0: 0T0 is missing"),
        (lambda order: [*order, part(Kind.T)], r"rank 0: 0T0 is doubled"),
        (lambda order: [*order, part(Kind.T, 1)], r"rank 0: 1T0 puts stage 1 on two ranks"),
        (lambda order: [*order, part(Kind.S, 3)], r"rank 0: 3S0 is unknown, ranks are 0\.\.1"),
        (lambda order: [part(Kind.T), *(a for a in order if a != part(Kind.T))], r"rank 0: 0T0 waits for"),
    ],
)
def test_what_is_wrong_is_named(change, message) -> None:
    schedule = shared("v-half", 2, 3)
    orders = (tuple(change(schedule.orders[0])), *schedule.orders[1:])
    with pytest.raises(InvalidSchedule, match=message):
        check(Schedule("wrong", schedule.placement, 3, orders))


def test_parts_of_a_vocabulary_that_is_not_shared_are_refused() -> None:
    schedule = shared("1f1b", 2, 2)
    with pytest.raises(InvalidSchedule, match="which the placement does not split"):
        check(Schedule("wrong", linear(2), 2, schedule.orders))


def test_costs_are_needed() -> None:
    schedule = shared("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"costs are not given: set Costs\.head"):
        simulate(schedule, replace(Costs.unit(schedule.placement), head=None))


@pytest.mark.parametrize("name", ["zb-h1", "interleaved", "v-half"])
def test_files_keep_it(name: str, tmp_path) -> None:
    schedule = shared(name, 4, 5)
    csv_file.write(schedule, tmp_path / f"{name}.csv")
    assert csv_file.read(tmp_path / f"{name}.csv") == schedule
    costs = of_model(schedule)
    costs_file.write(costs, tmp_path / "costs.json")
    assert costs_file.read(tmp_path / "costs.json") == costs
    timeline = simulate(schedule, costs)
    trace_file.write_timeline(tmp_path / "trace.json", timeline)
    step = trace_file.read(tmp_path / "trace.json")
    assert step.placement == schedule.placement
    assert step.timeline().schedule.orders == schedule.orders


def test_other_placements_have_another_digest() -> None:
    schedule = shared("1f1b", 2, 2)
    assert schedule.digest != Schedule("1f1b", linear(2), 2, schedule.orders).digest
