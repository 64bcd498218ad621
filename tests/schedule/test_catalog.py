import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import simulate


@pytest.mark.parametrize("name", catalog.NAMES)
def test_an_entry_tells_what_its_builder_does(name):
    entry = catalog.entry(name)
    schedule = catalog.build(name, 4, 8)
    assert schedule.name == entry.name == name
    assert schedule.placement.shape is entry.shape
    assert schedule.placement.chunks == entry.chunks
    assert entry.paper.startswith("arXiv ")
    assert catalog.build(name, 4, 8, entry.chunks) == schedule
    assert catalog.build(name, 4, 8) is schedule


@pytest.mark.parametrize(("typed", "meant"), [("zbh1", "zb-h1"), ("V-Halfe", "v-half"), ("1F1B", "1f1b")])
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'") as error:
        catalog.build(typed, 4, 8)
    assert all(name in str(error.value) for name in catalog.NAMES)


def test_an_unknown_name_may_have_no_nearest():
    with pytest.raises(ValueError, match="no schedule is called 'qqq', choose one of: gpipe, 1f1b"):
        catalog.entry("qqq")


@pytest.mark.parametrize("name", catalog.NAMES)
def test_sizes_that_cannot_be_built(name):
    with pytest.raises(ValueError, match=rf"{name} got 1 rank.*at least 2: add ranks"):
        catalog.build(name, 1, 8)
    with pytest.raises(ValueError, match=rf"{name} got 0 microbatches.*at least 1"):
        catalog.build(name, 4, 0)


def test_chunks_that_cannot_be_built():
    with pytest.raises(ValueError, match="v-half got 3 chunks a rank, but has 2: leave chunks out"):
        catalog.build("v-half", 4, 8, 3)
    with pytest.raises(ValueError, match="interleaved got 1 chunk"):
        catalog.build("interleaved", 4, 8, 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_forward_only(p):
    for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1):
        for placement in (linear(p), loop(p, 2), loop(p, 3), v(p), wave(p, 4)):
            schedule = catalog.forward_only(placement, m)
            check(schedule)
            assert all(a.kind is Kind.F for a in schedule)
            makespan = simulate(schedule, Costs.unit(placement)).makespan
            if placement.chunks == 1:
                assert makespan == m + p - 1
            if placement == v(p):
                # The last rank cannot start before p - 1 nor end later than p - 1 before the end.
                assert makespan == max(2 * m + 2 * (p - 1), 2 * p + m - 1)
            if placement == loop(p, 2) and m % p == 0:
                assert makespan == 2 * m + p - 1


@pytest.mark.parametrize("p", [2, 3, 8])
def test_forward_only_admits_no_more_than_the_v_holds(p):
    """Activations wait between the chunks of a rank; many microbatches must not mean many of them."""
    schedule = catalog.forward_only(v(p), 6 * p)
    between = [0]
    for action in schedule.orders[0]:
        between.append(between[-1] + (1 if action.stage == 0 else -1))
    assert max(between) == 2 * p - 1
