"""Each microbatch announces its shape to a rank once, as soon as a step has shown that it has one shape."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp_ext.features.units.megatron.agreement import AnnouncedShapes
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Announced

from tests.support.ranks import RankError, run_ranks  # isort: skip  (the stand-ins come before Megatron)
import torch.distributed as dist

import megatron_pp_ext
from tests.support import own_loop
from tests.support.own_loop_shapes import COUNTS, announced, padding_step, trained

FORWARD_STEP = own_loop.forward_step
CHUNKS = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "v-half": 2}
EDGES = {"interleaved": 3, "v-half": 2}
"""The activations of a microbatch that two ranks exchange, where these are more than one."""


def on_rank(rank: int) -> dict[Any, Any]:
    """Train by a loop that pads, whose shapes therefore do not follow from the data."""
    own_loop.start()
    step = {"forward_step_func": padding_step}
    found: dict[Any, Any] = {"stock": trained(1, **step)}
    for name, chunks in CHUNKS.items():
        with megatron_pp_ext.installed(name, ranks=2, microbatches=8, order="given"):
            found[name, "given"] = trained(chunks, **step)
    for name in EDGES:
        with megatron_pp_ext.installed(name, ranks=2, microbatches=8, order="rule"):
            found[name, "rule"] = trained(2, **step)
    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8):
        found["default"] = announced(2)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(on_rank, 2, timeout=300)


@pytest.mark.parametrize("name", CHUNKS)
def test_steps_that_announce_equal_stock(found: list[dict[Any, Any]], name: str) -> None:
    ours, stock = ([rank[key][0] for rank in found] for key in ((name, "given"), "stock"))
    own_loop.assert_same(ours, stock)


@pytest.mark.parametrize("name", CHUNKS)
def test_the_order_of_the_data_takes_nothing_for_granted(found: list[dict[Any, Any]], name: str) -> None:
    edges = EDGES.get(name, 1)
    assert [rank[name, "given"][1] for rank in found] == [[edges * count for count in COUNTS]] * 2


@pytest.mark.parametrize("name", EDGES)
def test_a_microbatch_announces_its_shape_to_a_rank_once(found: list[dict[Any, Any]], name: str) -> None:
    first, *others = COUNTS
    assert [rank[name, "rule"][1] for rank in found] == [[EDGES[name] * first, *others]] * 2


def test_so_it_does_without_an_order(found: list[dict[Any, Any]]) -> None:
    first, *others = COUNTS
    assert [rank["default"] for rank in found] == [[2 * first, *others]] * 2


def shortened(rank: int) -> None:
    """Train by a loop in which stage 2 of a V hands on fewer tokens from the second step on."""
    own_loop.start()
    calls = list[None]()

    def step(iterator: Any, model: Any) -> Any:
        output, loss = padding_step(iterator, model)
        calls.append(None)
        is_second = rank == 0 and model.module.vp_stage == 1
        return (output[1:] if is_second and len(calls) > 2 * COUNTS[0] else output), loss

    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, order="rule"):
        announced(2, forward_step_func=step)


def test_a_stage_that_hands_on_another_shape_ends_the_step() -> None:
    with pytest.raises(RankError, match=r"was agreed; .* each microbatch had one shape on all stages"):
        run_ranks(shortened, 2, timeout=120)


class _Inputs(SimpleNamespace):
    announces = StepInputs.announces


def decided(rank: int, seen: list[list[list[tuple[int, ...]]]]) -> Announced:
    """Return what is announced after steps in which microbatches had these shapes on this rank."""
    dist.init_process_group("gloo")
    schedule = catalog.build("v-half", 2, 2)
    shapes = AnnouncedShapes(may_repeat=True)
    groups = SimpleNamespace(pp=dist.group.WORLD)
    for of_step in (seen[rank], [[], []]):
        inputs = _Inputs(shape=(), shapes=(), groups=groups, forward_only=False, announced=None)
        step: Any = SimpleNamespace(inputs=inputs, schedule=schedule, plan=SimpleNamespace(rank=rank))
        with shapes.step(step):
            inputs.announced |= {number: set(each) for number, each in enumerate(of_step)}
    found: Announced = step.inputs.announces
    return found


ONE, OTHER = (8, 1, 4), (5, 1, 4)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([[[ONE], [OTHER]], [[ONE], [OTHER]]], Announced.FIRST),
        ([[[ONE], [OTHER]], [[ONE, OTHER], [OTHER]]], Announced.EVERY),
        ([[[ONE], [ONE]], [[ONE], [ONE]]], Announced.EVERY),  # says nothing of unlike lengths
    ],
)
def test_what_all_ranks_have_seen(seen: Any, expected: Announced) -> None:
    assert run_ranks(partial(decided, seen=seen), 2) == [expected] * 2
