"""PipeDream: where replicated stages send microbatches, and the steps between two updates of the weights."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule.actions import Kind, delivers, needs
from megatron_pp_ext.schedule.families import one_f_one_b, pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas, WeightVersion
from megatron_pp_ext.schedule.placement import linear

REPLICAS = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(lambda counts: Replicas(tuple(counts)))


@settings(deadline=None)
@given(REPLICAS, st.integers(1, 3), st.integers(1, 6))
def test_the_steps_of_a_run_are_one_schedule_without_a_flush(replicas, rounds, updates) -> None:
    interval = rounds * replicas.full_round
    steps = [pipedream.step(replicas, interval, update, updates) for update in range(updates)]
    whole = pipedream.orders(replicas, interval * updates)
    for rank, order in enumerate(whole):
        if len(replicas.turns(rank, interval * updates)) > replicas.warm_up(replicas.stage_of(rank)):
            assert tuple(action for step in steps for action in step[rank]) == order
    for number, step in enumerate(steps):
        for stage in range(replicas.stages):
            done = [a.microbatch for r in replicas.ranks_of(stage) for a in step[r] if a.kind is Kind.B]
            assert sorted(done) == list(range(number * interval, (number + 1) * interval))


@settings(deadline=None)
@given(REPLICAS, st.integers(1, 3))
def test_no_action_needs_one_of_a_later_update(replicas, rounds) -> None:
    """So the replicas of a stage can wait for each other at every update."""
    updates, placement = 5, linear(replicas.stages)
    steps = [
        pipedream.step(replicas, rounds * replicas.full_round, update, updates) for update in range(updates)
    ]
    done: set = set()
    for step in steps:
        done |= {delivers(action) for order in step for action in order}
        for order in step:
            for action in order:
                assert done.issuperset(needs(delivers(action), placement)), (replicas, action)


def test_versions_of_the_paper() -> None:
    """PipeDream: n - s versions on stage s; 2BW: two; vertical sync: everywhere as many as on the first."""
    stages = 4
    straight = Replicas.straight(stages)
    for stage in range(stages):
        behind = stages - 1 - stage
        assert len(pipedream.versions_kept(WeightVersion.LATEST, 50, stage, straight, 1)) == behind
        assert len(pipedream.versions_kept(WeightVersion.SAME, 50, stage, straight, 1)) == stages - 1
        assert len(pipedream.versions_kept(WeightVersion.PREVIOUS, 50, stage, straight, 4)) == 1


@settings(deadline=None)
@given(st.sampled_from(WeightVersion), REPLICAS, st.integers(1, 9), st.data())
def test_most_versions_are_those_of_the_fullest_update(weights, replicas, rounds, data) -> None:
    stage, interval = data.draw(st.integers(0, replicas.stages - 1)), rounds * replicas.full_round
    counts = [
        len(pipedream.versions_kept(weights, update, stage, replicas, interval)) for update in range(40)
    ]
    assert pipedream.most_versions(weights, stage, replicas, interval) == max(counts)


@settings(deadline=None)
@given(st.sampled_from(WeightVersion), REPLICAS, st.integers(1, 4))
def test_a_version_is_there_when_it_is_used(weights, replicas, rounds) -> None:
    """Never newer than what a stage has at the forward, and kept until the backward."""
    interval, updates = rounds * replicas.full_round, 8
    if weights is WeightVersion.PREVIOUS and interval < replicas.ranks - 1:
        return
    for update in range(updates):
        for rank, order in enumerate(pipedream.step(replicas, interval, update, updates)):
            stage = replicas.stage_of(rank)
            has = {update, *pipedream.versions_kept(weights, update, stage, replicas, interval)}
            # The first update begins with a fill, in which every version is the initial one.
            for action in order:
                used = pipedream.version(weights, action.microbatch, stage, replicas, interval)
                assert used in has, (action, used)
                if weights is WeightVersion.LATEST and action.kind is Kind.F:
                    assert used == update


@settings(deadline=None)
@given(REPLICAS, st.integers(1, 20))
def test_every_microbatch_meets_each_stage_once_and_in_order(replicas: Replicas, microbatches: int) -> None:
    orders = pipedream.orders(replicas, microbatches)
    done, ran, at = set(), [], [0] * replicas.ranks
    placement = linear(replicas.stages)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and done.issuperset(needs(order[at[rank]], placement)):
                action = order[at[rank]]
                assert rank == replicas.rank_of(action.stage, action.microbatch)
                done.add(delivers(action))
                ran.append(action)
                at[rank] += 1
                moved = True
    assert [len(order) for order in orders] == at  # no ranks wait in a circle
    stages, every = range(replicas.stages), range(microbatches)
    assert sorted(ran) == sorted((stage, kind, m) for stage in stages for kind in "FB" for m in every)


@settings(deadline=None)
@given(REPLICAS)
def test_as_many_in_flight_as_the_paper_says(replicas: Replicas) -> None:
    """NOAM = ceil(ranks / replicas of the input stage), a replica."""
    order = pipedream.orders(replicas, 200)[0]
    first_backward = [action.kind for action in order].index(Kind.B)
    assert first_backward == math.ceil(replicas.ranks / replicas.counts[0])


def test_without_replication_it_is_1f1b() -> None:
    assert pipedream.orders(Replicas((1, 1, 1, 1)), 9) == one_f_one_b.build(4, 9).orders


@pytest.mark.parametrize("counts", [(), (2,), (1, 0)])
def test_bad_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more for each of 2 stages or more"):
        Replicas(counts)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="microbatches are 0"):
        pipedream.orders(Replicas((2, 1)), 0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.2, got 3"):
        Replicas((2, 1)).stage_of(3)
    with pytest.raises(ValueError, match=r"update must be in 0\.\.4, got 5"):
        pipedream.step(Replicas.straight(4), 1, 5, 5)
    with pytest.raises(
        ValueError, match=r"4 microbatch\(es\) cannot be .* replicas 2-3; take a multiple of 6$"
    ):
        pipedream.step(Replicas((2, 3)), 4, 0, 1)
