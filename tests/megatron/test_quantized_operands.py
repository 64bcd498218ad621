"""Quantized operands that wait for W: the copy that W does not read is let go of, and nothing else is.

Transformer Engine's own classes are in tests/engine.
"""

import pytest
import torch

from tests.support.deferred import ROWS, WIDTH, put


def numbers():
    return torch.zeros(ROWS * WIDTH, dtype=torch.uint8)


class Storage:
    """Two copies, of which ``update_usage`` drops what is not asked for."""

    def __init__(self):
        self.rows, self.columns = numbers(), numbers()

    def get_data_tensors(self):
        return self.rows, self.columns

    def update_usage(self, rowwise_usage, columnwise_usage):
        assert columnwise_usage and self.columns is not None
        if not rowwise_usage:
            self.rows = None


class Single(Storage):
    """One copy for both uses, as FP8 with one scale a tensor on Blackwell."""

    def update_usage(self, rowwise_usage, columnwise_usage):
        self.columns = None


class OfOldEngines:
    """Storages of Transformer Engine 2.3 cannot be told."""

    def __init__(self):
        self.get_data_tensors = Storage().get_data_tensors


class Groups:
    """All groups in one; in bf16 the columnwise copy is missing."""

    def __init__(self, is_quantized):
        self.rowwise_data = numbers()
        self.scale_inv, self.columnwise_data = (numbers(), numbers()) if is_quantized else (None, None)

    def get_data_tensors(self):
        return self.rowwise_data, self.columnwise_data, self.scale_inv


class FromAutograd(torch.Tensor):
    """A tensor that carries such copies, with a handle of its own for whoever asks for one."""

    def __new__(cls, copies):
        made = torch.Tensor._make_subclass(cls, torch.zeros(ROWS, WIDTH))
        made.copies = copies
        return made

    def detach(self):
        handle = Storage()
        handle.rows, handle.columns = self.copies.get_data_tensors()
        return FromAutograd(handle)

    def get_data_tensors(self):
        return self.copies.get_data_tensors()

    def update_usage(self, **usage):
        self.copies.update_usage(**usage)


def copies(operand):
    """How many copies of its numbers ``operand`` holds."""
    return sum(tensor is not None for tensor in operand.get_data_tensors())


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (Storage, 1),
        (Single, 1),
        (OfOldEngines, 2),
        (lambda: Groups(is_quantized=True), 1),
        (lambda: Groups(is_quantized=False), 1),
        (lambda: FromAutograd(Storage()), 1),
    ],
    ids=["storage", "one copy", "old engine", "groups", "groups in bf16", "tensor"],
)
def test_w_keeps_what_it_reads(make, kept):
    """That holds for every group, too."""
    waiting, given = put([make(), make()], [make(), make()])
    assert [copies(operand) for operands in given for operand in operands] == 4 * [kept]
    assert waiting == 4 * kept * ROWS * WIDTH


def test_a_tensor_that_others_may_hold_stays_whole():
    shared = FromAutograd(Storage())
    _, given = put(Storage(), shared)
    assert copies(shared) == 2
    assert copies(given[1]) == 1 and given[1].get_data_tensors()[1] is shared.get_data_tensors()[1]


def test_what_is_not_quantized_is_handed_over_as_it_is():
    input, gradient = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    waiting, given = put(input, gradient)
    assert given[0] is input and given[1] is gradient
    assert waiting == 2 * 4 * ROWS * WIDTH
