"""What an order asks of a loop and its data, and the lines in which those end that do not have it."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_pp_ext.features.units.megatron.agreement import UnknownLengths
from megatron_pp_ext.features.units.megatron.read_ahead import (
    one_item_each,
    planned,
    read_documents,
    require_read,
)
from megatron_pp_ext.features.units.megatron.steps import _require_no_replay
from megatron_pp_ext.features.units.options import Ordering, lengths_of_batch, with_lengths, with_order

from megatron_pp_ext.compiler.request import named  # isort: skip

COUNT = 4
LENGTHS = 8, 5, 20, 3
WORDS = torch.randint(0, 1000, (COUNT, 64), generator=torch.Generator().manual_seed(3))


def read(*iterators: Any, lengths_of: Any = lengths_of_batch, count: int = COUNT) -> tuple[Any, Any]:
    """Return the lengths of a step's documents, and the items of each chunk."""
    data: list[Any] = []
    inputs: Any = SimpleNamespace(iterators=list(iterators), microbatches=count)
    return read_documents(inputs, data, Ordering("rule", lengths_of=lengths_of)), data


def fresh() -> Iterator[dict[str, torch.Tensor]]:
    for number, length in enumerate(LENGTHS):
        yield {"tokens": WORDS[number : number + 1, :length].clone()}


def test_data_is_read_ahead_by_chunks() -> None:
    documents, (first, none, last) = read(fresh(), None, fresh())
    assert documents == ((8,), (5,), (20,), (3,))
    assert none is None
    assert [item["tokens"].shape for item in first] == [item["tokens"].shape for item in last]
    assert read(None) == (None, [None])


def test_data_that_ends_within_a_step_is_named() -> None:
    with pytest.raises(RuntimeError, match="ended after 4 of the 5 microbatches"):
        read(fresh(), count=5)


def test_chunks_that_read_one_iterator_are_refused() -> None:
    iterator = fresh()
    with pytest.raises(RuntimeError, match="chunks of this rank read one data iterator; give each"):
        read(iterator, iterator)


def test_data_without_next_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"the data iterator is a list, and an order reads ahead by next\(\)"
    ):
        read([*fresh()])


class Staging:
    """A loader that fills one buffer anew for each microbatch, and hands out what ``yields`` makes of it."""

    def __init__(self, yields: Any) -> None:
        self._yields, self._number = yields, -1
        self.buffer = torch.zeros(1, 64, dtype=torch.long)

    def __next__(self) -> Any:
        self._number += 1
        self.buffer[:] = WORDS[self._number]
        return self._yields(self.buffer, LENGTHS[self._number])


@dataclass
class Batch:
    """A batch with a part that has tokens."""

    part: dict[str, Any]


def as_array(buffer: torch.Tensor, length: int) -> Any:
    return {"tokens": buffer.numpy()[:, :length]}


REUSES = {
    "from the left": lambda buffer, length: {"tokens": buffer[:, :length]},
    "from the right": lambda buffer, length: {"tokens": buffer[:, -length:]},
    "whole": lambda buffer, length: {"tokens": buffer},
    "alone": lambda buffer, length: buffer.view(-1)[:length],
    "in a list": lambda buffer, length: [0, (buffer[0, :length],)],
    "in an object": lambda buffer, length: Batch({"tokens": buffer[0, :length]}),
    "as an array": as_array,
}


@pytest.mark.parametrize("name", REUSES)
def test_a_buffer_that_is_filled_anew_is_refused(name: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"written microbatch 1 over microbatch 0.* yield tensors that are"
    ):
        read(Staging(REUSES[name]), lengths_of=lambda _: [1])


def test_two_buffers_in_turns_are_refused() -> None:
    def in_turns() -> Iterator[Any]:
        buffers = [Staging(REUSES["whole"]) for _ in range(2)]
        while True:
            yield from map(next, buffers)

    with pytest.raises(RuntimeError, match=r"written microbatch 2 over microbatch 0 \(tokens\)"):
        read(in_turns())


def test_what_stays_may_be_shared() -> None:
    """Masks and positions that are made once, and rows of one tensor."""
    mask, places = torch.ones(64, 64).tril().bool(), torch.arange(64)

    def sharing() -> Iterator[Any]:
        for number, length in enumerate(LENGTHS):
            yield {
                "tokens": WORDS[number : number + 1, :length],
                "attention_mask": mask[:length, :length],
                "position_ids": places[:length],
            }

    assert read(sharing())[0] == ((8,), (5,), (20,), (3,))


def test_an_iterator_that_yields_one_object_is_refused() -> None:
    def one_object() -> Iterator[Any]:
        batch: dict[str, Any] = {}
        for contents in fresh():
            batch.update(contents)
            yield batch

    with pytest.raises(RuntimeError, match="yields one dict for microbatches 0 and 1, and an order reads"):
        read(one_object())


def test_numbers_and_other_items_that_cannot_change_may_come_again() -> None:
    assert read(iter([7, 7, "a", "a"]), lengths_of=lambda _: [1])[0] == ((1,),) * 4


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (5, r"lengths of microbatch 0 are 5, but must be a list"),
        (torch.tensor(5), "must be a list of whole numbers"),
        ([2.5], r"are \[2.5\], but must be a list of whole numbers"),
        ("8", "must be a list of whole numbers"),
        (None, "must be a list of whole numbers"),
        ([], "microbatch 0 has no documents: give the length of at least one, or leave the order out"),
        ([4, 0], "microbatch 0 has the length 0, but a document has 1 to"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        read(fresh(), lengths_of=lambda _: lengths)


def test_lengths_may_be_numbers_of_all_kinds() -> None:
    kinds = iter([torch.tensor([4, 2]), np.array([3]), (1,), [torch.tensor(9)]])
    assert read(fresh(), lengths_of=lambda _: next(kinds))[0] == ((4, 2), (3,), (1,), (9,))


def test_lengths_are_read_from_megatrons_batches() -> None:
    assert lengths_of_batch({"cu_seqlens": torch.tensor([[0, 5, 8, 8, 8]])}) == [5, 3]
    assert lengths_of_batch({"tokens": torch.zeros(2, 7)}) == [7, 7]
    assert lengths_of_batch({"cu_seqlens": None, "input_ids": torch.zeros(1, 4)}) == [4]
    assert lengths_of_batch({"tokens": np.zeros((1, 4))}) == [4]
    rows = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    assert lengths_of_batch({"input_ids": rows}) == [3, 5]


@pytest.mark.parametrize(
    "batch",
    [
        {"text": 1},
        [1],
        {"tokens": [torch.zeros(4)]},
        {"cu_seqlens": [0, 4]},
        {"tokens": torch.zeros(4)},
    ],
)
def test_lengths_that_cannot_be_told_are_unknown(batch: Any) -> None:
    with pytest.raises(
        UnknownLengths, match=r"lengths of documents are not known: .* give lengths, a function"
    ):
        read(iter([batch]), count=1)


def test_a_function_that_cannot_tell_is_named() -> None:
    def lengths_of(batch: Any) -> list[int]:
        raise ValueError("no documents here")

    with pytest.raises(
        UnknownLengths, match=r"^lengths= cannot tell those of microbatch 0: no documents here$"
    ):
        read(fresh(), lengths_of=lengths_of)


class Lazy(dict[str, Any]):
    """A batch whose tensors are made when they are asked for, as those of a lazy stack."""

    def items(self) -> Any:
        return [(name, value.clone()) for name, value in super().items()]


def test_tensors_that_are_made_on_the_way_do_not_count_as_written_over() -> None:
    """Freed memory would be that of the next."""
    rows = torch.arange(COUNT * 8192).view(COUNT, 1, 8192)
    assert read(Lazy(tokens=row) for row in rows)[0] == ((8192,),) * COUNT


def test_what_a_loader_raises_comes_through() -> None:
    def damaged() -> Iterator[Any]:
        yield next(fresh())
        raise ValueError("sample 17 is damaged")

    with pytest.raises(ValueError, match=r"^sample 17 is damaged$") as error:
        read(damaged())
    assert not isinstance(error.value, UnknownLengths)


class Loader:
    """A loader with more than ``next``."""

    epoch = 3

    def __next__(self) -> Any:
        return None

    def __len__(self) -> int:
        return 9


def call(iterator: Any, reads: int = 1) -> list[Any]:
    """Call a forward step that reads so many items, and return them."""
    step: Any = one_item_each(lambda data, model: [next(data) for _ in range(reads)])  # type: ignore[arg-type]
    items: list[Any] = step(iterator, None)
    return items


def test_a_loop_gets_its_items_in_the_order() -> None:
    first, none = planned([Loader(), None], [["a", "b", "c"], None], [2, 0, 1])
    assert none is None
    assert bool(first) and iter(first) is first
    assert [call(first) for _ in range(3)] == [["c"], ["a"], ["b"]]
    assert call(None, reads=0) == []
    require_read([first, none], has_first_stage=True)


def test_another_use_of_the_iterator_is_refused() -> None:
    (data,) = planned([Loader()], [["a"]], [0])
    with pytest.raises(
        RuntimeError, match=r"uses len\(\) of its data iterator, which an order has read ahead"
    ):
        len(data)
    with pytest.raises(RuntimeError, match="uses epoch of its data iterator"):
        _ = data.epoch
    assert not hasattr(data, "sampler"), "an attribute that the data does not have"
    (data,) = planned([iter(["a"])], [["a"]], [0])
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(data)


def test_another_number_of_items_than_one_a_microbatch_is_refused() -> None:
    (data,) = planned([Loader()], [["a", "b"]], [1, 0])
    call(data)
    with pytest.raises(RuntimeError, match="has read 1 of the items of 2 microbatches"):
        require_read([data], has_first_stage=True)
    with pytest.raises(RuntimeError, match="reads more than one item for a microbatch"):
        call(data, reads=2)


def test_a_first_stage_that_reads_nothing_is_refused() -> None:
    unread = planned([Loader(), Loader()], [["a"], ["b"]], [0])
    require_read(unread, has_first_stage=False)
    require_read([None], has_first_stage=True)
    with pytest.raises(RuntimeError, match="reads nothing by next"):
        require_read(unread, has_first_stage=True)
    call(unread[1])
    require_read(unread, has_first_stage=True)


def test_replayed_routing_is_refused() -> None:
    _require_no_replay(SimpleNamespace(enable_routing_replay=False))
    with pytest.raises(
        RuntimeError, match="enable_routing_replay in the model's config: routing is replayed"
    ):
        _require_no_replay(SimpleNamespace(enable_routing_replay=True))


def test_orders_that_cannot_be() -> None:
    request = named("1f1b", 2, 4)
    with pytest.raises(ValueError, match="order is 'best'; give"):
        with_order(request, "best")
    with pytest.raises(ValueError, match="lengths are given without an order that goes by them; give order="):
        with_lengths(request, len)
    assert with_lengths(with_order(request, "rule"), len).option(Ordering).lengths_of is len
