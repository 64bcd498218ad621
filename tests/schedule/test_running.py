"""The pace of a pipeline that never flushes, against closed forms and against runs of a fixed length."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_pp_ext.pipedream.pace import seconds_of_an_update
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.simulate import simulate

SECONDS = st.floats(1, 10)
REPLICAS = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(lambda counts: Replicas(tuple(counts)))


def costs_of(*stages: tuple[float, float], hop: float = 0.0) -> Costs:
    """Costs of stages by the seconds of their forward and of their whole backward."""
    return Costs(tuple(StageCosts(f, b / 2, b / 2) for f, b in stages), hop)


def closed_form(replicas: Replicas, interval: int, costs: Costs, updating: list[float]) -> float:
    """The seconds of an update in which the busiest rank never waits."""
    return max(works(replicas, interval, costs, updating))


def works(replicas: Replicas, interval: int, costs: Costs, updating: list[float]) -> list[float]:
    """The seconds that a rank of each stage works for an update."""
    each = (stage.forward + stage.input_gradient + stage.weight_gradient for stage in costs.stages)
    return [
        interval // count * seconds + update
        for count, seconds, update in zip(replicas.counts, each, updating, strict=True)
    ]


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 5), st.integers(1, 6), st.floats(0, 5), st.data())
def test_one_replica_each_has_the_pace_of_a_long_1f1b(ranks, interval, hop, data) -> None:
    stages = data.draw(st.lists(st.tuples(SECONDS, SECONDS), min_size=ranks, max_size=ranks))
    costs, rounds = costs_of(*stages, hop=hop), 60
    few, many = (
        simulate(one_f_one_b.build(ranks, interval * count), costs).makespan for count in (rounds, 2 * rounds)
    )
    found = seconds_of_an_update(Replicas.straight(ranks), interval, costs, [0.0] * ranks)
    assert found == pytest.approx((many - few) / rounds, rel=0.02)


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (2, 1), (3, 1), (15, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("update", [0.0, 7.0])
def test_in_balance_these_never_wait(counts, rounds, update) -> None:
    """The closed form: the work of a replica and its update, though replicas meet at every update."""
    replicas = Replicas(counts)
    interval = rounds * replicas.full_round
    costs = costs_of(*((10.0 * count, 20.0 * count) for count in counts))
    updating = [update if count > 1 else 0.0 for count in counts]
    found = seconds_of_an_update(replicas, interval, costs, updating)
    assert found == pytest.approx(closed_form(replicas, interval, costs, updating))


@pytest.mark.parametrize(
    ("counts", "rounds", "ratio"),
    [((1, 2), 1, 1.25), ((1, 2), 4, 1.125), ((2, 1, 1), 1, 1.5), ((1, 2, 1), 4, 1.5), ((4, 2, 1), 1, 1.5)],
)
def test_other_balanced_pipelines_wait(counts, rounds, ratio) -> None:
    """With F and B in strict turns and the paper's depths, replicas that start together run into each other.

    1-2 by hand, with K = 2, F 10 and B 20 on stage 0 and twice that on stage 1: two updates take 150.
    """
    replicas = Replicas(counts)
    interval = rounds * replicas.full_round
    costs = costs_of(*((10.0 * count, 20.0 * count) for count in counts))
    nothing = [0.0] * replicas.stages
    found = seconds_of_an_update(replicas, interval, costs, nothing)
    assert found == pytest.approx(ratio * closed_form(replicas, interval, costs, nothing))


SHORT = (0.1, 0.2)
NEARLY = [(10.0 - at * 1e-4 * math.pi, 20.0) for at in range(12)]


@pytest.mark.parametrize(
    ("counts", "interval", "stages", "hop", "seconds", "off"),
    [
        # Stage 0 takes 42 seconds for an update, and stage 2 takes 43: they set the pace in turn.
        ((1, 4, 1), 4, [(5.25, 5.25), (1.0, 1.0), (1.0, 9.75)], 0, 42.5, 0.5 / 42.5),
        # Stage 1 sends the sixth forward behind the first backward, by its depth of 4.  One of the three
        # replicas of stage 2 needs it before its own backward, and so runs when the others have.
        ((1, 1, 3, 1), 3, [SHORT, SHORT, (100.0, 200.0), SHORT], 0, 2 * 300, 0.01),
        # Two in flight on each replica of stage 0, which come back after F, hop, F, B, hop and B.
        ((2, 1), 2, [(1.0, 2.0), (1.0, 2.0)], 50.0, (1 + 50 + 1 + 2 + 50 + 2) / 2, 0.05),
        # Two ways through take nearly the same time.  Such a pipeline does not repeat itself for long; its
        # pace is that of the slower way.
        ((1,) * 13, 1, [(10.0, 20.0), *NEARLY], 0, 30, 1e-3),
    ],
    ids=["in turn", "behind a backward", "messages", "two ways"],
)
def test_by_hand(counts, interval, stages, hop, seconds, off) -> None:
    costs = costs_of(*stages, hop=hop)
    found = seconds_of_an_update(Replicas(counts), interval, costs, [0.0] * len(counts))
    assert found == pytest.approx(seconds, rel=off)


@settings(deadline=None, max_examples=50)
@given(REPLICAS, st.integers(1, 4), st.floats(0, 5), st.data())
def test_no_pipeline_is_faster_than_its_busiest_rank(replicas, rounds, hop, data) -> None:
    interval = rounds * replicas.full_round
    number = {"min_size": replicas.stages, "max_size": replicas.stages}
    costs = costs_of(*data.draw(st.lists(st.tuples(SECONDS, SECONDS), **number)), hop=hop)
    updating = data.draw(st.lists(st.floats(0, 9), **number))
    found = seconds_of_an_update(replicas, interval, costs, updating)
    # A rank that is nearly as busy gets ahead by a microbatch for each rank.  That is a quarter of those over
    # which a pipeline is timed that does not repeat itself.
    busy = works(replicas, interval, costs, updating)
    assert found >= min(work for work in busy if work >= 0.75 * max(busy)) * (1 - 1e-6)


@settings(deadline=None, max_examples=50)
@given(REPLICAS, st.integers(1, 4), st.data())
def test_a_single_rank_that_is_far_slower_than_the_others_never_waits(replicas, rounds, data) -> None:
    assume(1 in replicas.counts)
    interval = rounds * replicas.full_round
    slowest = data.draw(st.sampled_from([at for at, count in enumerate(replicas.counts) if count == 1]))
    costs = costs_of(*((100.0, 200.0) if at == slowest else (0.1, 0.2) for at in range(replicas.stages)))
    updating = [5.0] * replicas.stages
    found = seconds_of_an_update(replicas, interval, costs, updating)
    assert found == pytest.approx(closed_form(replicas, interval, costs, updating), rel=0.02)


def test_stages_that_wait_for_each_other_all_take_the_longest_update() -> None:
    """With one microbatch an update and a barrier behind it, a stage's update does not hide behind others."""
    costs = costs_of((10.0, 20.0), (10.0, 20.0))
    straight = Replicas.straight(2)
    apart, together = (seconds_of_an_update(straight, 1, costs, [0.0, 6.0], wait) for wait in (False, True))
    assert apart == pytest.approx(36)
    # The last stage's forward and backward, then the first stage's backward, and the update.
    assert together == pytest.approx(10 + 20 + 20 + 6)


def test_unequal_turns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"take a multiple of 2$"):
        seconds_of_an_update(Replicas((2, 1)), 3, costs_of((1, 1), (1, 1)), [0.0, 0.0])
