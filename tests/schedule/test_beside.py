"""Which W lends its products to which I."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import of_sizes
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.schedule.timing import ScheduleTimer, lenders, lenders_of

SPLIT = [name for name, entry in catalog.ENTRIES.items() if entry.splits_backward]


def built(name, ranks, microbatches, splits_head=False):
    chunks = catalog.entry(name).chunks
    return make(of_sizes(name, ranks, microbatches, chunks, splits_head=splits_head)).schedule


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 3), (4, 9)])
@pytest.mark.parametrize("splits_head", [False, True])
def test_what_lends(name, ranks, microbatches, splits_head):
    schedule = built(name, ranks, microbatches, splits_head)
    for order in schedule.orders:
        for place, lender in lenders(order, schedule.paired):
            input, weight = order[place], order[lender]
            assert (input.kind, weight.kind) == (Kind.I, Kind.W)
            assert {action.kind for action in order[place + 1 : lender]} <= {Kind.S, Kind.T}
            # The lender's own I is done, or this one; other I and W of the stages, and forwards, are to come.
            assert order.index(weight._replace(kind=Kind.I)) <= place
            rest = order[lender + 1 :]
            assert any(action.kind is Kind.W and action.stage == weight.stage for action in rest)
            assert any(action.kind is Kind.I and action.stage == input.stage for action in rest)
            assert any(action.kind is Kind.F for action in order[place:])


def test_zb_h1_by_hand():
    """The last W lends nothing, and nothing does after the last F."""
    schedule = catalog.build("zb-h1", 2, 3)
    assert " ".join(map(str, schedule.orders[0])) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert lenders(schedule.orders[0], frozenset()) == [(2, 3)]


def test_none_lends_across_another_action_or_to_a_pair():
    order = catalog.build("zb-h1", 2, 3).orders[0]
    whole = (*order[:3], order[3]._replace(kind=Kind.B, microbatch=1), *order[3:])
    assert lenders(whole, frozenset()) == []
    assert lenders(order, frozenset({order[1]})) == []


def test_parts_of_a_split_head_may_come_between():
    schedule = built("zb-h1", 4, 16, splits_head=True)
    found = lenders(schedule.orders[-1], schedule.paired)
    assert any(lender > place + 1 for place, lender in found)


@given(
    st.sampled_from(SPLIT),
    st.integers(2, 4),
    st.integers(1, 9),
    st.floats(0, 0.5),
    st.floats(0, 0.8),
)
def test_lent_seconds_move_and_hidden_ones_go(name, ranks, microbatches, hidden, lent):
    """Each rank works as long as without, less what its messages hide, whatever the order."""
    schedule = catalog.build(name, ranks, microbatches)
    stages = schedule.placement.stages
    plain = Costs((StageCosts(1, 1.2, 0.8),) * stages)
    lending = Costs((StageCosts(1, 1.2, 0.8, hidden=hidden, lent=lent, hidden_beside=hidden),) * stages)
    alone, beside = (simulate(schedule, costs) for costs in (plain, lending))
    timer = ScheduleTimer(schedule)
    for rank, places in enumerate(timer.lenders):

        def busy(timeline, rank=rank):
            return sum(end - start for _, start, end in timeline.events[rank])

        wholes = sum(action.kind is Kind.B for action in schedule.orders[rank])
        saved = len(places) * min(hidden, lent) + wholes * hidden
        assert busy(beside) == pytest.approx(busy(alone) - saved)
        order = schedule.orders[rank]
        assert lenders_of(schedule, rank) == {order[place]: order[lender] for place, lender in places}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (4, 32), (8, 16)])
def test_lending_never_makes_a_step_longer_at_usual_costs(name, ranks, microbatches):
    schedule = catalog.build(name, ranks, microbatches)
    stages = schedule.placement.stages
    costs = StageCosts(1.0, 1.15, 0.85, lent=0.35, hidden_beside=0.2)
    alone = StageCosts(1.0, 1.15, 0.85)
    if any(action.kind is Kind.B for action in schedule):
        pytest.skip("whole backwards hide their messages anyhow")
    steps = [simulate(schedule, Costs((one,) * stages)).makespan for one in (costs, alone)]
    assert steps[0] <= steps[1]
