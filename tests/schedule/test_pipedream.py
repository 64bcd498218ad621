"""PipeDream's steps are 1F1B, cut where a rank updates its weights."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.families import one_f_one_b, pipedream
from megatron_pp_ext.schedule.families.pipedream import Weights


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 9), st.integers(1, 6))
def test_the_steps_of_a_run_are_1f1b_without_a_flush(ranks: int, interval: int, updates: int) -> None:
    steps = [pipedream.step(ranks, interval, update, updates) for update in range(updates)]
    whole = one_f_one_b.build(ranks, interval * updates)
    for rank in range(ranks):
        order = [action for step in steps for action in step.orders[rank]]
        if updates * interval >= ranks - rank:
            assert tuple(order) == whole.orders[rank]
    for number, step in enumerate(steps):
        for order in step.orders:
            backwards = [action.microbatch for action in order if action.kind is Kind.B]
            assert backwards == list(range(number * interval, (number + 1) * interval))


def test_versions_of_the_paper() -> None:
    """PipeDream: n - s versions on stage s; 2BW: two; vertical sync: everywhere as many as on the first."""
    ranks = 4
    for stage in range(ranks):
        behind = ranks - 1 - stage
        assert len(pipedream.versions_kept(Weights.LATEST, 50, stage, ranks, 1)) == behind
        assert len(pipedream.versions_kept(Weights.SAME, 50, stage, ranks, 1)) == ranks - 1
        assert len(pipedream.versions_kept(Weights.PREVIOUS, 50, stage, ranks, 4)) == 1


@settings(deadline=None)
@given(st.sampled_from(Weights), st.integers(2, 8), st.integers(1, 9), st.data())
def test_most_versions_are_those_of_the_fullest_update(weights, ranks, interval, data) -> None:
    stage = data.draw(st.integers(0, ranks - 1))
    counts = [len(pipedream.versions_kept(weights, update, stage, ranks, interval)) for update in range(40)]
    assert pipedream.most_versions(weights, stage, ranks, interval) == max(counts)


@settings(deadline=None)
@given(st.sampled_from(Weights), st.integers(2, 6), st.integers(1, 8), st.integers(0, 60), st.data())
def test_a_version_is_there_when_it_is_used(weights, ranks, interval, microbatch, data) -> None:
    """Never newer than what a stage has at the forward, and kept until the backward."""
    stage = data.draw(st.integers(0, ranks - 1))
    used = pipedream.version(weights, microbatch, stage, ranks, interval)
    at_forward = max(0, (microbatch - pipedream.in_flight(stage, ranks)) // interval)
    at_backward = microbatch // interval
    if weights is Weights.PREVIOUS and interval < ranks - 1:
        return
    assert used <= at_forward
    for update in range(used + 1, at_backward + 1):
        assert used in pipedream.versions_kept(weights, update, stage, ranks, interval)


def test_an_update_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match=r"update must be in 0\.\.4, got 5"):
        pipedream.step(4, 1, 5, 5)
