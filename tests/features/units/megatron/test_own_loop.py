"""Steps in a planned order equal stock's on data in that order; losses come back in the caller's order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_pp_ext.compiler.limits import kept_by_1f1b
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import lengths_of_batch
from megatron_pp_ext.features.units.plan import Plan, Planner, Template
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.features.units.units import Units, whole
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.simulate import simulate

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_pp_ext
from megatron_pp_ext.features.units.megatron.run_costs import RunCosts
from tests.support import own_loop

COUNTS = (8, 5)
LIMIT = 0.75
LENGTHS = (8, 5, 7, 3, 2)
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "v-half": 2, "interleaved": 2}
BATCHES = own_loop.batches


def in_orders(orders: list[tuple[int, ...]]) -> Iterator[Any]:
    """Yield the batches of each step in its order."""
    data = BATCHES(LENGTHS)
    for order in orders:
        step = [next(data) for _ in order]
        yield from (step[number] for number in order)


def trained(chunks: int, data: Any = None) -> own_loop.Record:
    model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    if data is not None:
        own_loop.batches = lambda *_: in_orders(data)
    try:
        return own_loop.train(model, COUNTS, LENGTHS, seq_length=1)
    finally:
        own_loop.batches = BATCHES


def planned_orders(name: str) -> list[tuple[int, ...]]:
    """Return the order of each step, by the lengths alone."""
    data, found = own_loop.batches(LENGTHS), []
    for count in COUNTS:
        schedule = make(named(name, 2, count)).schedule
        rates = LengthCosts.with_attention(Costs.per_rank(2, schedule.placement.chunks), 1)
        units = whole(lengths_of_batch(next(data)) for _ in range(count))
        template = Template(schedule, moves_weights=False)
        found.append(Planner(schedule.placement, rates).plan(units, "rule", template=template).order)
    return found


def count_moved() -> list[bool]:
    """Return what will say of each plan with W moved whether they have other places."""
    moved: list[bool] = []
    plan = Planner.plan

    def watched(self: Planner, units: Units, *more: Any, template: Template, **about: Any) -> Plan:
        found = plan(self, units, *more, template=template, **about)
        moved.append(found.schedule.orders != template.schedule.orders)
        return found

    Planner.plan = watched
    return moved


def noted_costs() -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Return what will have the documents of each ordered step, as they are noted for measured costs."""
    noted: list[Any] = []
    note = RunCosts.note

    def watched(costs: RunCosts, step: int, microbatches: Microbatches) -> None:
        noted.append((step, microbatches.documents))
        note(costs, step, microbatches)

    RunCosts.note = watched
    return noted


def _without_weights(order: Any) -> list[Any]:
    return [action for action in order if action.kind is not Kind.W]


def plans_within_limits() -> list[tuple[Plan, UnitCosts, tuple[float, ...], bool]]:
    """Return what will have each plan within limits, with its costs and limits, and whether F or I moved."""
    plans: list[Any] = []
    plan = Planner.plan

    def watched(self: Planner, units: Units, *more: Any, template: Template, **about: Any) -> Plan:
        found = plan(self, units, *more, template=template, **about)
        if about.get("limits") is not None:
            schedules = found.schedule, template.schedule
            one, other = ([_without_weights(order) for order in each.orders] for each in schedules)
            plans.append((found, self.costs(units), about["limits"], one != other))
        return found

    Planner.plan = watched
    return plans


def on_rank(rank: int) -> dict[Any, Any]:
    own_loop.start()
    found: dict[Any, Any] = {"moved": count_moved(), "noted": noted_costs()}
    for name, chunks in SCHEDULES.items():
        orders = planned_orders(name)
        found["orders", name] = orders
        found["stock", name] = trained(1, orders)
        with megatron_pp_ext.installed(name, ranks=2, microbatches=8, order="rule") as about:
            found["ours", name] = trained(chunks)
        found["line", name] = str(about)
    planned = plans_within_limits()
    for how in ("rule", "search"):
        with megatron_pp_ext.installed(
            "flex", ranks=2, microbatches=8, memory_limit=LIMIT, costs=(1.0,) * 4, order=how
        ) as about:
            found["ours", f"flex {how}"] = trained(about.chunks)
        orders = [plan.order for plan, *_ in planned[-len(COUNTS) :]]
        found["orders", f"flex {how}"] = orders
        found["stock", f"flex {how}"] = trained(1, orders)
    found["flex"], kept = list(planned), len(planned)
    with megatron_pp_ext.installed("auto", ranks=2, microbatches=8, order="rule") as about:
        found["ours", "auto"] = trained(about.chunks)
    found["auto"] = planned[kept:]
    found["orders", "auto"] = [tuple(range(COUNTS[0])), *(plan.order for plan, *_ in found["auto"])]
    found["stock", "auto"] = trained(1, found["orders", "auto"])
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=8, order="rule"):
        model = own_loop.build(1)
        iterators = [own_loop.batches() for _ in model]
        found["evaluated"] = [
            float(one["loss"]) for one in own_loop.run_step(model, iterators, 3, forward_only=True)
        ]
    model = own_loop.build(1)
    iterators = [own_loop.batches() for _ in model]
    found["by stock"] = [
        float(one["loss"]) for one in own_loop.run_step(model, iterators, 3, forward_only=True)
    ]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", [*SCHEDULES, "flex rule", "flex search", "auto"])
def test_a_planned_order_equals_stock_on_data_in_that_order(found, name):
    ours, stock = ([rank[kind, name] for rank in found] for kind in ("ours", "stock"))
    orders = found[0]["orders", name]
    if name in SCHEDULES:
        assert "microbatches of unlike length ordered by the rule of the schedule" in found[0]["line", name]
    are_as_given = [order == tuple(range(len(order))) for order in orders]
    if name in SCHEDULES:
        assert not any(are_as_given)
    else:
        assert not all(are_as_given)
    assert name != "auto" or are_as_given[0], "nothing is known of memory in the first step"
    for order, given, in_order in zip(orders, ours[-1].losses, stock[-1].losses, strict=True):
        assert [given[number] for number in order] == in_order, "losses are in the caller's order"
    for record, other in zip(ours, stock, strict=True):
        record.losses = other.losses
    own_loop.assert_same(ours, stock)


def test_costs_are_noted_in_the_order_in_which_microbatches_ran(found):
    """What a measured step has recorded is that of microbatch k of the schedule."""
    names = [*SCHEDULES]
    orders = [order for name in names for order in found[0]["orders", name]]
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(sum(COUNTS))]
    steps = [lengths[: COUNTS[0]], lengths[COUNTS[0] :]] * len(names)
    expected = [
        (number % 2, tuple((step[k],) for k in order))
        for number, (step, order) in enumerate(zip(steps, orders, strict=True))
    ]
    for rank in found:
        assert rank["noted"][: len(expected)] == expected


def test_flex_keeps_its_limit_in_tokens(found):
    """A part of what 1F1B keeps of this step, or the largest microbatch where that is more."""
    assert len(found[0]["flex"]) == 2 * len(COUNTS)
    assert len(found[0]["auto"]) == 1
    assert any(have_moved for *_, have_moved in found[0]["flex"])
    for plan, costs, limits, _ in found[0]["flex"]:
        kept = simulate(plan.schedule, costs.ordered(plan.order)).peak_activations
        assert all(peak <= limit * (1 + 1e-6) for peak, limit in zip(kept, limits, strict=True))
        largest = max(sum(stage.activation for stage in unit.stages) / 2 for unit in costs.units)
        limit = max(largest, LIMIT * kept_by_1f1b(2, len(plan.order), costs))
        assert limits == pytest.approx([limit] * 2)


def test_weight_gradients_fill_the_holes_of_the_step(found):
    assert any(any(rank["moved"]) for rank in found)


def replicas(rank: int, overlaps: bool) -> Any:
    """Train two replicas on unlike data, whose W have other places."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    moved = count_moved()
    lengths = LENGTHS if parallel_state.get_data_parallel_rank() == 0 else (2, 8, 8, 3, 7, 4)
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8, order="rule"):
        model = own_loop.build(
            1, overlaps=overlaps, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"
        )
        return own_loop.train(model, COUNTS, lengths, seq_length=1), moved


def test_replicas_whose_weight_gradients_move_apart_reduce_in_one_order():
    overlapping, after = (run_ranks(replicas, 4, overlaps) for overlaps in (True, False))
    assert any(overlapping[0][1]) or any(overlapping[2][1])
    for (one, _), (other, _) in zip(overlapping, after, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in other.weights)


def test_evaluations_are_left_alone(found):
    assert found[-1]["evaluated"] == found[-1]["by stock"] != []
