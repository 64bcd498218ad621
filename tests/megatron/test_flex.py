"""Schedules that are compiled or read from a file: they train as stock does and keep their limit."""

from pathlib import Path

import pytest

from megatron_pp_ext.compiler.limits import Budget, at_most, least_limits
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.features.guided.order import may_keep
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Shape, linear, v, wave
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import assert_same_bits, assert_same_gradients, run, stock
from tests.support.flags import PP4, estimated_costs, read

FLEX = ("--pipeline-schedule", "flex", "--pipeline-memory-limit")


def test_a_wave_of_four_chunks_trains_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks 1 and 3 of every rank are mirrored, 0 and 2 are not."""
    flags = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "4")
    assert read(monkeypatch, f"{' '.join(flags)} {' '.join(FLEX)} 0.75").placement == wave(2, 4)
    ours = run(2, [*flags, *FLEX, "0.75"])
    assert_same_gradients(ours, stock(2, *flags[:2]))


def test_auto_trains_as_stock() -> None:
    """Nothing is scarce here, so the second step may keep all microbatches that help."""
    flags = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    assert_same_gradients(run(2, [*flags, "--pipeline-schedule", "auto"]), stock(2, *flags))


def test_a_file_trains_as_stock(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    csv_file.write(catalog.build("v-zb", 2, 8), file)
    flags = ("--pipeline-model-parallel-size", "2")
    assert_same_bits(run(2, [*flags, "--pipeline-schedule", f"csv:{file}"]), stock(2, *flags))


def test_an_amount_holds_messages_and_a_fraction_activations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's schedules, which are those that ``mpp estimate`` times, too."""
    estimated = estimated_costs(PP4, 8)
    whole = 4 * estimated.merged(4).stages[0].activation
    assert estimated.message
    totals = {}
    for limit in (0.75, 0.75 * whole):
        source = read(monkeypatch, f"{PP4} {' '.join(FLEX)} {limit!r}").source
        schedule = source.schedule(8)
        timeline = simulate(schedule, estimated.merged(schedule.placement.stages))
        assert max(timeline.peak_activations) <= 0.75 * whole
        assert (
            make(named("flex", 4, 8, limit=limit), CostModel.fixed(estimated)).schedule.digest
            == schedule.digest
        )
        totals[limit] = max(timeline.peak_memory)
    assert totals[0.75 * whole] <= 0.75 * whole < totals[0.75]


def test_auto_takes_what_is_free_and_never_less_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step it takes the least; a device that is nearly full gets that schedule again."""
    auto = read(monkeypatch, f"{PP4} --pipeline-schedule auto").source
    costs = estimated_costs(PP4, 8).merged(auto.placement.stages)
    needed = least_limits(costs, auto.placement)
    first = auto.schedule(8)
    assert auto.schedule(8, [1.0] * 4).digest == first.digest
    assert may_keep(auto, first, costs, [1.0] * 4) == Budget(needed)
    some = (1.0, 2 * needed[1], 1.0, 3 * needed[3])
    assert may_keep(auto, first, costs, some) == Budget((needed[0], some[1], needed[2], some[3]))
    roomy = auto.schedule(8, [100 * limit for limit in needed])
    least, most = (simulate(one, costs) for one in (first, roomy))
    assert all(map(at_most, least.peak_memory, needed))
    assert max(needed) < max(most.peak_memory)
    assert most.makespan < least.makespan


def test_auto_uses_what_each_rank_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank with little memory does not hold back what the others may keep."""
    auto = read(monkeypatch, f"{PP4} --pipeline-schedule auto").source
    costs = estimated_costs(PP4, 8).merged(auto.placement.stages)
    needed = least_limits(costs, auto.placement)
    free = (4 * needed[0], 1.5 * needed[1], 4 * needed[2], 4 * needed[3])
    mixed = simulate(auto.schedule(8, free), costs)
    assert all(map(at_most, mixed.peak_memory, free))
    even = simulate(auto.schedule(8, [1.5 * limit for limit in needed]), costs)
    assert mixed.makespan < even.makespan


def test_a_better_schedule_keeps_no_more_on_any_rank() -> None:
    """The limit is each rank's own peak, and 0 where its stage keeps nothing."""
    costs = Costs((StageCosts(1, 1, 1, 0.0), StageCosts(1, 1, 1, 8.0)))
    family = Source(named("1f1b", 2, 4), CostModel.fixed(costs))
    assert may_keep(family, family.ordinary, costs, [0.0] * 2) == Budget((0.0, 8.0))


def test_a_file_for_another_pipeline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "two.csv"
    csv_file.write(catalog.build("1f1b", 2, 4), file)
    with pytest.raises(ValueError, match="for 2 ranks, got --pipeline-model-parallel-size 4"):
        read(monkeypatch, f"{PP4} --pipeline-schedule csv:{file}")


def test_a_file_that_parts_samples_from_labels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "swapped.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ValueError, match="each reads the next sample: give all stages one order of F"):
        read(monkeypatch, f"--pipeline-model-parallel-size 2 --pipeline-schedule csv:{file}")


def test_placement_follows_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, f"{PP4} {' '.join(FLEX)} 0.5").placement == v(4)
    assert read(monkeypatch, f"{PP4} --num-layers 4 {' '.join(FLEX)} 1").placement == linear(4)
    layout = "--num-layers 6 --pipeline-model-parallel-layout E|t|t|t*2|t|t||L"
    assert read(monkeypatch, f"{PP4} {layout} {' '.join(FLEX)} 0.75").placement.shape in (Shape.V, Shape.LOOP)
