"""The routing and the depths of PipeDream's replicated stages."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule.actions import Kind, delivers, needs
from megatron_pp_ext.schedule.families import one_f_one_b, round_robin
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.placement import linear

REPLICAS = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(lambda counts: Replicas(tuple(counts)))


@settings(deadline=None)
@given(REPLICAS, st.integers(1, 20))
def test_every_microbatch_meets_each_stage_once_and_in_order(replicas: Replicas, microbatches: int) -> None:
    orders = round_robin.orders(replicas, microbatches)
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
    order = round_robin.orders(replicas, 200)[0]
    first_backward = [action.kind for action in order].index(Kind.B)
    assert first_backward == math.ceil(replicas.ranks / replicas.counts[0])


def test_without_replication_it_is_1f1b() -> None:
    assert round_robin.orders(Replicas((1, 1, 1, 1)), 9) == one_f_one_b.build(4, 9).orders


@pytest.mark.parametrize("counts", [(), (2,), (1, 0)])
def test_bad_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more for each of 2 stages or more"):
        Replicas(counts)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="microbatches are 0"):
        round_robin.orders(Replicas((2, 1)), 0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.2, got 3"):
        Replicas((2, 1)).stage_of(3)
