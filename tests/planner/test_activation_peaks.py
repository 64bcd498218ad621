"""Bytes in flight: those of the simulation, more where a backward computes things again."""

from itertools import product

import pytest

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.planner.step.programs import Prepared, program
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import rounding


def parts(stages, **more):
    times = {"forward_seconds": 1.0, "input_gradient_seconds": 1.1, "weight_gradient_seconds": 0.7}
    return [
        Part(**times, after_forward=10.0 + stage, after_input_gradient=7.0 - stage / 40, **more)
        for stage in range(stages)
    ]


@pytest.mark.parametrize("again", [{}, {"workspace": 6.0, "workspace_in_whole": 9.0}])
@pytest.mark.parametrize("name", catalog.NAMES)
def test_peaks_are_the_simulations(name, again):
    schedule = catalog.build(name, 4, 10)
    stages = parts(schedule.placement.stages, **again)
    timeline = simulate(schedule, Costs(tuple(part.costs() for part in stages)))
    assert Prepared(schedule).in_flight.peaks(stages) == pytest.approx(timeline.peak_activations)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_more_microbatches_never_need_less(name):
    """The search looks at 2p microbatches first: what does not fit then, does not fit with more."""
    chunks = catalog.entry(name).chunks
    for ranks, few in product((2, 3, 8), (2, 3)):
        before = few * ranks
        for after in (before + 1, 2 * before + 1):
            stages = parts(ranks * chunks, workspace=1.0, workspace_in_whole=4.0)
            less, more = (
                program(name, ranks, count, chunks).in_flight.peaks(stages) for count in (before, after)
            )
            rounded = rounding.relative(3 * chunks * after, rounding.FLOAT64)
            assert max(less) <= max(more) * (1 + rounded)


def test_a_whole_backward_computes_one_group_again():
    schedule = catalog.build("1f1b", 2, 4)
    plain, again = parts(2), parts(2, workspace_in_whole=4.0)
    assert Prepared(schedule).in_flight.peaks(again) == pytest.approx(
        [peak + 4 for peak in Prepared(schedule).in_flight.peaks(plain)]
    )


def test_an_input_gradient_keeps_what_its_forward_did_not():
    stages = [Part(1, 1, 1, 1.0, 1.0, 1.0, after_forward=1.0, after_input_gradient=5.0, workspace=2.0)] * 2
    # zb-h1's last rank: one forward, and at most two microbatches between I and W.
    peaks = Prepared(catalog.build("zb-h1", 2, 4)).in_flight.peaks(stages)
    assert max(peaks) >= 7


@pytest.mark.parametrize("is_paired", [False, True])
def test_without_a_pipeline_there_is_one_microbatch_in_flight(is_paired):
    """In a pair one half keeps by layer what the other frees; both halves and the ends of a step count."""
    order = program("interleaved", 1, 3, 1, options=(Pairs(),) if is_paired else ())
    assert order.in_flight.peaks(parts(1, workspace_in_whole=4.0)) == pytest.approx([10 + 4])
    assert len(order.timer.schedule.paired) == (2 if is_paired else 0)
    assert order.timer.spans(Costs((parts(1)[0].costs(),), pair=0.75))[0].end == pytest.approx(
        2.8 * (1 + 2 * 0.75) if is_paired else 3 * 2.8
    )
