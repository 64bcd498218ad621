"""Slots of memory: as few as possible, and graphs that are replayed by them compute what eager layers do."""

import random

import pytest

from megatron_pp_ext.compiler import request
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.schedule import catalog, placement
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.slots import Slots
from tests.support.graphed_chunks import Defects, wrong_results
from tests.support.random_orders import random_schedule

FLUSHING = [name for name in catalog.NAMES if catalog.abilities(name).flushes]
SPLIT = ("zb-h1", "v-half", "v-zb")


def steps_of(schedule: Schedule) -> list[list[tuple[Action, ...]]]:
    return [list(together(order, schedule.paired)) for order in schedule.orders]


def in_slices(schedule: Schedule, parts: int) -> list[list[tuple[Action, ...]]]:
    """Each microbatch in ``parts`` slices: forwards in order, backwards from the last one."""
    return [
        [
            (Action(action.stage, action.kind, parts * action.microbatch + at),)
            for action in order
            for at in (range(parts) if action.kind is Kind.F else reversed(range(parts)))
        ]
        for order in schedule.orders
    ]


def in_flight(steps: list[tuple[Action, ...]]) -> list[set[tuple[int, int]]]:
    """The (stage, microbatch) in flight in each step: from F to the last half of the backward."""
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for at, step in enumerate(steps):
        for stage, _, microbatch in step:
            first.setdefault((stage, microbatch), at)
            last[stage, microbatch] = at
    return [{unit for unit in first if first[unit] <= at <= last[unit]} for at in range(len(steps))]


@pytest.mark.parametrize("name", FLUSHING)
def test_a_rank_has_a_slot_for_each_microbatch_in_flight(name: str) -> None:
    for steps in steps_of(make(request.named(name, 4, 8)).schedule):
        slots, units = Slots.of(steps), in_flight(steps)
        assert slots.count == max(map(len, units))
        assert all(len({slots.by_unit[unit] for unit in together}) == len(together) for together in units)


def test_stages_of_a_rank_share_slots() -> None:
    """The largest of all ranks; stage by stage they would need 8 and 12."""
    for name, count in (("v-half", 6), ("interleaved-zb", 8)):
        assert max(Slots.of(steps).count for steps in steps_of(catalog.build(name, 4, 16))) == count


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-min", *SPLIT])
def test_graphs_replayed_by_slot_compute_what_eager_layers_do(name: str) -> None:
    for rank in (0, 1):
        assert wrong_results(steps_of(catalog.build(name, 2, 4))[rank]) == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_slices_go_back_from_the_last_one(name: str) -> None:
    for steps in in_slices(catalog.build(name, 2, 2), 3):
        assert wrong_results(steps) == 0


@pytest.mark.parametrize("seed", range(2))
def test_any_order_does(seed: int) -> None:
    schedule = random_schedule(random.Random(seed), placement.v(2), 4)
    for steps in steps_of(schedule):
        assert wrong_results(steps) == 0


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(
    "defects",
    [Defects(ends_at_input=True), Defects(fewer=1), Defects(shares_gradients=True)],
    ids=["ends at I", "one slot less", "one gradient"],
)
def test_a_planted_defect_gives_wrong_numbers(name: str, defects: Defects) -> None:
    assert sum(wrong_results(steps, defects) for steps in steps_of(catalog.build(name, 2, 6))) > 0


def test_flex_fits_into_the_slots_of_its_memory() -> None:
    """It is given half of what 1F1B keeps, which has 4 slots."""
    for steps in steps_of(make(request.named("flex", 4, 8, limit=0.5), CostModel(Costs.unit)).schedule):
        assert wrong_results(steps) == 0


@pytest.mark.wide
@pytest.mark.parametrize("name", FLUSHING)
def test_graphs_of_every_schedule(name: str) -> None:
    for steps in steps_of(make(request.named(name, 4, 8)).schedule):
        assert wrong_results(steps) == 0


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(40))
def test_graphs_of_random_orders(seed: int) -> None:
    """Whole and halved backwards mixed, microbatches in any order, in slices or not."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    place = draw.choice([placement.linear(ranks), placement.v(ranks), placement.loop(ranks, 2)])
    schedule = random_schedule(draw, place, draw.randint(2, 6))
    orders = in_slices(schedule, 2) if draw.random() < 0.3 else steps_of(schedule)
    assert wrong_results(draw.choice(orders)) == 0
