"""PipeDream: where replicated stages send microbatches, and the steps between two updates of the weights."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_pp_ext.pipedream.pace import seconds_of_an_update
from megatron_pp_ext.schedule.actions import Kind, delivers, needs
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import one_f_one_b, pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas, WeightVersion
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.simulate import simulate

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


SECONDS = st.floats(1, 10)
REPLICATED = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(lambda counts: Replicas(tuple(counts)))


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
@given(REPLICATED, st.integers(1, 4), st.floats(0, 5), st.data())
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
@given(REPLICATED, st.integers(1, 4), st.data())
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
