"""Loops that ask for no order: which of them keep the order of their data, and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ranks import run_ranks

# isort: split
import torch
import torch.distributed as dist

from megatron_pp_ext.features.lengths.megatron import first_step
from megatron_pp_ext.features.lengths.megatron.first_step import FirstStep
from megatron_pp_ext.features.lengths.ordering import Ordering, lengths_of_batch

COUNT = 4


class OtherData:
    """Data that a loop reads by a name of its own, as slime's does."""

    def __init__(self) -> None:
        self._data = batches((8, 5))

    def __next__(self) -> Any:
        return next(self._data)

    def get_next(self) -> Any:
        """Return the next batch."""
        return next(self._data)


def batches(lengths: tuple[int, ...], **more: Any) -> Iterator[Any]:
    return iter([{"tokens": torch.zeros(1, length), **more} for length in lengths * COUNT])


def once(data: Any) -> None:
    for _ in range(COUNT):
        next(data)


def twice(data: Any) -> None:
    once(data)
    once(data)


def by_name(data: Any) -> None:
    for _ in range(COUNT):
        data.get_next()


def reads_nothing(data: Any) -> None:
    pass


def decided(rank: int, cases: list[tuple[Any, Any, dict[str, Any]]]) -> list[Any]:
    """Return, for each case, the lines and, for each step with an order, which chunks are read ahead."""
    dist.init_process_group("gloo")
    lines: list[str] = []
    first_step.print_rank_0 = lines.append
    found = []
    for data, read, config in cases:
        lines.clear()
        ordered: list[Any] = []

        def then(are_read: Any, shapes: Any, ordered: list[Any] = ordered) -> Any:
            @contextmanager
            def step(_: Any) -> Iterator[None]:
                ordered.append(list(are_read))
                yield

            return step

        steps = FirstStep(Ordering("rule", is_default=True, is_watched=True), then)
        for _ in range(3):
            # Rank 1 is one in the middle of a pipeline, which reads nothing.
            inputs = SimpleNamespace(
                forward_only=False,
                iterators=[None if data is None else data(), batches((8,))],
                microbatches=COUNT,
                announced=None,
                config=SimpleNamespace(**{"variable_seq_lengths": False, **config}),
            )
            with steps.step(SimpleNamespace(inputs=inputs)):  # type: ignore[arg-type]
                if rank == 0 and not ordered:
                    read(inputs.iterators[0])
        found.append((list(lines), ordered))
    return found


VARIABLE = {"variable_seq_lengths": True}
CASES: list[tuple[str, Any, Any, dict[str, Any], str]] = [
    ("unlike lengths", lambda: batches((8, 5)), once, VARIABLE, "lengths of microbatches may differ"),
    ("packed", lambda: batches((8,), cu_seqlens=torch.tensor([0, 3, 8])), once, {}, "may differ"),
    ("one shape", lambda: batches((8,)), once, {}, ""),
    ("twice", lambda: batches((8, 5)), twice, VARIABLE, "reads its data 8 times for 4 microbatches"),
    ("by name", OtherData, by_name, VARIABLE, "uses get_next of its data iterator"),
    ("no data", None, reads_nothing, VARIABLE, "no data is read by next"),
    ("numbers", lambda: iter(range(COUNT)), once, VARIABLE, "the lengths of documents are not known"),
    ("replay", lambda: batches((8, 5)), once, {**VARIABLE, "enable_routing_replay": True}, "replayed"),
]


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """Return what both ranks decide on the cases."""
    return run_ranks(decide, 2, timeout=120)


def decide(rank: int) -> list[Any]:
    return decided(rank, [case[1:4] for case in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case[0] for case in CASES])
def test_a_loop_is_ordered_where_its_data_can_be_and_need_be(found, number):
    words = CASES[number][-1]
    (lines, ordered), (_, of_other) = (rank[number] for rank in found)
    assert len(lines) == bool(words)
    assert all(words in line for line in lines)
    is_ordered = "may differ" in words
    assert ordered == [[True, False]] * 2 * is_ordered
    assert of_other == [[False, False]] * 2 * is_ordered, "all ranks decide alike, and read what they need"


def test_nested_rows_of_unlike_length_are_left_to_the_call():
    rows = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    with pytest.raises(ValueError, match="give lengths, a function"):
        lengths_of_batch({"input_ids": rows})
