"""Families against what others offer under the same name: never longer, never more memory."""

from itertools import pairwise

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import ALIASES
from megatron_pp_ext.schedule.placement import loop
from megatron_pp_ext.schedule.simulate import simulate
from reference.published_schedules import MORE_UNIT_COST
from tests.support import rounding
from tests.support.torchs import TORCH, torch_schedule

TIMES = [(1, 1, 1, 0), (1, 1.1, 0.7, 0.05), (1, 1, 0.5, 0), (1, 2, 1, 0.1)]


def timed(schedule, times=TIMES[0]):
    forward, i, w, hop = times
    costs = Costs.uniform(schedule.placement, forward=forward, input_gradient=i, weight_gradient=w, hop=hop)
    return simulate(schedule, costs)


def rounded(ranks, microbatches):
    """Return what a makespan may be multiplied by for its rounding: no path is longer than all actions."""
    return 1 + rounding.relative(2 * 3 * ranks * microbatches, rounding.FLOAT64)


@pytest.mark.parametrize("theirs", TORCH)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_torch_is_met(theirs, p):
    name, placement = TORCH[theirs]
    for m in (2 * p, 4 * p):
        reference = torch_schedule(theirs, placement(p), m)
        for times in TIMES:
            ours, other = timed(catalog.build(name, p, m), times), timed(reference, times)
            assert ours.makespan <= other.makespan * rounded(p, m), (m, times)
            assert max(ours.peak_activations) <= max(other.peak_activations), (m, times)


def test_torchs_zero_bubble_with_one_chunk_is_zb_h1():
    for p, m in ((2, 4), (4, 8), (8, 32)):
        reference = torch_schedule("ScheduleInterleavedZeroBubble", loop(p, 1), m)
        for times in TIMES:
            other = timed(reference, times).makespan
            assert timed(catalog.build("zb-h1", p, m), times).makespan <= other * rounded(p, m)


@pytest.mark.parametrize(("p", "m", "makespan", "_", "peak"), MORE_UNIT_COST["1f1b-v"])
def test_1f1b_v_of_the_papers_implementation_is_met(p, m, makespan, _, peak):
    timeline = timed(catalog.build("1f1b-v", p, m))
    assert timeline.makespan <= makespan
    assert max(timeline.peak_activations) <= peak


def test_dualpipe_v_as_drawn():
    """DeepSeek's order, the two of a pair one after the other."""
    assert [" ".join(map(str, order)) for order in catalog.build("dualpipe-v", 2, 5).orders] == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4",
    ]


def test_dualpipe_v_pairs_forwards_with_backwards_of_other_microbatches():
    for order in catalog.build("dualpipe-v", 4, 16).orders:
        pairs = list(pairwise(order))
        steady = [(f, b) for f, b in pairs if f.kind is Kind.F and b.kind is Kind.B]
        assert len(steady) >= 2 * 9
        assert sum(f.microbatch > b.microbatch for f, b in steady) >= len(steady) - 1


@pytest.mark.parametrize("alias", ALIASES)
def test_the_names_of_others_are_understood(alias):
    name = ALIASES[alias]
    assert alias not in catalog.NAMES
    assert catalog.entry(alias).name == name
    assert catalog.build(alias, 4, 8) == catalog.build(name, 4, 8)


@pytest.mark.parametrize("name", ["seq1f1b", "group-interleaved"])
def test_what_is_not_offered_says_why(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not offered here: .*use v-half") as error:
        catalog.entry(name)
    assert "\n" not in str(error.value)
