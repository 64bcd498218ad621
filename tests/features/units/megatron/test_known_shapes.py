"""Shapes that follow from batches are announced in the first ordered step alone; a loop may pad, too."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp_ext.features.units.megatron.agreement import Agreed, KnownShapes, sizes_of

from tests.support.ranks import RankError, run_ranks  # isort: skip  (the stand-ins come before Megatron)

import megatron_pp_ext
from tests.support import own_loop
from tests.support.own_loop_shapes import COUNTS, announced, padding_step


def on_rank(rank: int) -> dict[str, list[int]]:
    own_loop.start()
    found = {}
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8, order="rule"):
        found["plain"] = announced()
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8, order="rule"):
        found["padded"] = announced(forward_step_func=padding_step)
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=8, order="given"):
        found["given"] = announced()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[int]]]:
    return run_ranks(on_rank, 2, timeout=300)


def test_shapes_that_follow_from_batches_are_announced_once(found: list[dict[str, list[int]]]) -> None:
    """A gradient has the shape of its activations, and announces none at all."""
    assert [rank["plain"] for rank in found] == [[COUNTS[0], 0, 0]] * 2


def test_a_loop_that_pads_announces_as_ever(found: list[dict[str, list[int]]]) -> None:
    assert [rank["padded"] for rank in found] == [list(COUNTS)] * 2


def test_the_order_of_the_data_announces(found: list[dict[str, list[int]]]) -> None:
    assert [rank["given"] for rank in found] == [list(COUNTS)] * 2


def pads_later(rank: int) -> None:
    """Train by a loop that pads from its third step on."""
    own_loop.start()
    calls = list[None]()

    def is_padded() -> bool:
        calls.append(None)
        return len(calls) > sum(COUNTS[:2])

    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=8, order="rule"):
        announced(forward_step_func=partial(padding_step, is_padded=is_padded))


def test_another_shape_than_was_handed_over_ends_the_step() -> None:
    with pytest.raises(RankError, match=r"was agreed; .* in the first steps all shapes followed"):
        run_ranks(pads_later, 2, timeout=120)


def inputs_of(tensor_ranks: int = 1) -> Any:
    """The inputs of a step whose messages have unlike shapes."""
    config = SimpleNamespace(variable_seq_lengths=True, sequence_parallel=True, hidden_size=16)
    groups = SimpleNamespace(
        tp=SimpleNamespace(size=lambda: tensor_ranks), cp=SimpleNamespace(size=lambda: 1)
    )
    return SimpleNamespace(shape=(), shapes=(), config=config, groups=groups, announced={})


def announce(shapes: KnownShapes, announces: Sequence[tuple[int, int, int]], *sizes: tuple[int, int]) -> None:
    """Run a step with microbatches of these ``sizes``."""
    inputs = inputs_of()
    with shapes.step(inputs, agreed(*sizes), range(len(sizes))):
        inputs.announced |= {number: {shape} for number, shape in enumerate(announces)}


def agreed(*sizes: tuple[int, int]) -> Agreed:
    return Agreed(sizes=sizes)


@pytest.mark.parametrize(
    ("sizes", "announces", "are_trusted"),
    [
        ([(1, 8), (1, 4)], [(8, 1, 16), (4, 1, 16)], True),
        ([(2, 8), (2, 4)], [(8, 2, 16), (4, 2, 16)], True),
        ([(1, 8), (1, 8)], [(8, 1, 16), (8, 1, 16)], False),  # says nothing of padding
        ([(1, 8), (1, 5)], [(8, 1, 16), (8, 1, 16)], False),
    ],
)
def test_what_a_step_has_shown(sizes: Any, announces: Any, are_trusted: bool) -> None:
    shapes = KnownShapes()
    announce(shapes, announces, *sizes)
    assert shapes.are_trusted == are_trusted


def test_one_other_shape_is_enough_for_the_whole_run() -> None:
    shapes = KnownShapes()
    announce(shapes, [(8, 1, 16), (8, 1, 16)], (1, 8), (1, 5))
    announce(shapes, [(8, 1, 16), (5, 1, 16)], (1, 8), (1, 5))
    assert not shapes.are_trusted


def test_tokens_that_tensor_ranks_cannot_share_tell_no_shapes() -> None:
    data = [[{"tokens": torch.zeros(1, 8)}, {"tokens": torch.zeros(1, 5)}]]
    assert KnownShapes.known_sizes(inputs_of(tensor_ranks=2), data) == ()
    assert KnownShapes.known_sizes(inputs_of(tensor_ranks=1), data) == ((1, 8), (1, 5))


def test_sizes_are_those_of_the_tensors() -> None:
    packed = {"tokens": torch.zeros(1, 8), "cu_seqlens": torch.tensor([0, 3, 5])}
    last = {"tokens": None, "labels": torch.zeros(2, 6)}
    assert sizes_of([None, [packed, last]]) == ((1, 8), (2, 6))
    assert sizes_of([[packed, {"text": 1}]]) == sizes_of([[[1]]]) == sizes_of([None]) == ()
