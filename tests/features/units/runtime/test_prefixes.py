"""Attention of slices has the outputs and the gradients of attention of the whole sequence."""

import weakref
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_pp_ext.features.units.runtime import Sequence
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Owner

LENGTH, HEADS, WIDTH = 12, 2, 4


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention whose last query sees all keys; all are [tokens, heads, width]."""
    scores = torch.einsum("qhd,khd->hqk", query, key)
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def leaves(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = LENGTH, HEADS, WIDTH
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]


@pytest.mark.parametrize("bounds", [(0, 12), (0, 6, 12), (0, 1, 4, 5, 12)])
def test_gradients_are_those_of_the_whole(bounds: tuple[int, ...]) -> None:
    whole, ours = leaves(), leaves()
    attention(*whole).sin().sum().backward()
    sequence, outputs = Sequence(Owner(0, 0), LENGTH), []
    for start, end in pairwise(bounds):
        query, key, value = (one[start:end] for one in ours)
        seen = (sequence.grown(name, one, start) for name, one in (("key", key), ("value", value)))
        outputs.append(attention(query, *seen).sin().sum())
    for output in reversed(outputs):
        output.backward()
    for one, other in zip(ours, whole, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_repeated_layer_has_keys_of_each_call(recomputes: bool) -> None:
    """Also where recomputation calls it again, the last call first."""
    (whole, *_), (ours, *_) = leaves(), leaves()
    hidden = whole
    for _ in range(2):
        hidden = attention(hidden, hidden.cos(), hidden.sin())
    hidden.sin().sum().backward()
    sequence, outputs = Sequence(Owner(0, 0), LENGTH), []
    for start, end in pairwise((0, 5, 12)):

        def call(hidden: torch.Tensor, start: int = start) -> torch.Tensor:
            key, value = hidden.cos(), hidden.sin()
            return attention(
                hidden, sequence.grown("key", key, start, 2), sequence.grown("value", value, start, 2)
            )

        hidden = ours[start:end]
        for _ in range(2):
            hidden = checkpoint(call, hidden, use_reentrant=True) if recomputes else call(hidden)
        outputs.append(hidden.sin().sum())
        sequence.end_forward(end)
    for output in reversed(outputs):
        output.backward()
    assert torch.allclose(ours.grad, whole.grad, rtol=0, atol=1e-12)


def test_no_prefix_is_copied() -> None:
    sequence = Sequence(Owner(0, 0), LENGTH)
    first = sequence.grown("key", torch.ones(4, 1), 0)
    second = sequence.grown("key", torch.zeros(8, 1), 4)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (len(first), len(second)) == (4, 12)


def test_what_slices_share_is_counted_until_the_sequence_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ActivationMeter()
    monkeypatch.setattr(STORE, "meter", meter)
    sequence = Sequence(Owner(0, 0), LENGTH)
    new = [torch.ones(6, 2, requires_grad=True) for _ in range(2)]
    sums = [sequence.grown("key", one, start).sum() for one, start in zip(new, (0, 6), strict=True)]
    assert meter.live_bytes == LENGTH * 2 * 4
    sums.pop().backward()
    assert meter.live_bytes == (LENGTH + 6) * 2 * 4
    sums.pop().backward()
    assert new[0].grad.tolist() == [[2.0] * 2] * 6
    gone = weakref.ref(sequence.prefixes["key"])
    del sequence
    assert gone() is None
    assert meter.live_bytes == 0


def test_half_precision_gradients_are_summed_in_fp32() -> None:
    sequence = Sequence(Owner(0, 0), 3)
    new = [torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    outputs = [sequence.grown("key", one, start) for start, one in enumerate(new)]
    for output, gradient in zip(reversed(outputs), (256.0, 1.0, 1.0), strict=True):
        output.backward(torch.full_like(output, gradient))
    assert new[0].grad.item() == 258.0  # one after the other, bf16 would lose both ones


def test_a_layer_is_called_once_for_each_slice() -> None:
    """One that is called twice, or for some slices, would read keys that are not there."""
    sequence = Sequence(Owner(0, 0), 4)
    for layer in ("first", "second"):
        sequence.grown(layer, torch.ones(2, 1), 0)
    with pytest.raises(ValueError, match="called twice for a slice"):
        sequence.grown("first", torch.ones(2, 1), 0)
    sequence.end_forward(2)
    with pytest.raises(ValueError, match="for some slices of a sequence alone"):
        sequence.grown("third", torch.ones(2, 1), 2)
    sequence.grown("first", torch.ones(2, 1), 2)
    with pytest.raises(ValueError, match="for some slices of a sequence alone"):
        sequence.end_forward(4)
    sequence.grown("second", torch.ones(2, 1), 2)
    sequence.end_forward(4)


def test_a_backward_recomputes_a_slice() -> None:
    sequence, new = Sequence(Owner(0, 0), 4), torch.ones(2, 1, requires_grad=True)

    def layer(one: torch.Tensor, start: int) -> torch.Tensor:
        return sequence.grown("key", one, start).sin().sum()

    outputs = []
    for start in (0, 2):
        outputs.append(checkpoint(layer, new, start, use_reentrant=False))
        sequence.end_forward(start + 2)
    for output in reversed(outputs):
        output.backward()
    assert new.grad.flatten().tolist() == pytest.approx([3 * torch.ones(()).cos().item()] * 2)


DECAY = 0.9


def recurrence(sequence: Sequence, new: torch.Tensor, start: int) -> torch.Tensor:
    """A layer with a state, h = decay * h + x, and a tail of the last two inputs, each of which counts."""
    tail = sequence.entered("tail", start, new)
    state = sequence.entered("state", start, new)
    seen = torch.cat([new.new_zeros(2) if tail is None else tail, new])
    state, results = new.new_zeros(()) if state is None else state, []
    for at in range(len(new)):
        state = DECAY * state + seen[at] * seen[at + 2].sin()
        results.append(state)
    end = start + len(new)
    result = sequence.handed_on("tail", seen[-2:], end, torch.stack(results))
    return sequence.handed_on("state", state, end, result)


def in_slices(new: torch.Tensor, bounds: tuple[int, ...], recomputes: bool = False) -> Sequence:
    """Run forwards of slices between ``bounds``, and their backwards in reverse."""
    sequence, outputs = Sequence(Owner(0, 0), bounds[-1]), []
    for start, end in pairwise(bounds):
        part = new[start:end]
        if recomputes:
            result = checkpoint(recurrence, sequence, part, start, use_reentrant=False)
        else:
            result = recurrence(sequence, part, start)
        outputs.append(result.cos().sum())
        sequence.end_forward(end)
    for output in reversed(outputs):
        output.backward()
    return sequence


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("bounds", [(0, 6, 12), (0, 1, 2, 7, 8, 12)])
def test_gradients_of_states_are_those_of_the_whole(bounds: tuple[int, ...], recomputes: bool) -> None:
    """Also of a slice with fewer tokens than its tail, and where the forward of a slice runs again in I."""
    numbers = leaves()[0].detach()[:, 0, 0]
    whole, ours = (numbers.clone().requires_grad_() for _ in range(2))
    in_slices(whole, (0, LENGTH))
    sequence = in_slices(ours, bounds, recomputes)
    assert torch.allclose(ours.grad, whole.grad, rtol=0, atol=1e-12)
    assert [(state.entering, state.owed) for state in sequence.states.values()] == [({}, {})] * 2


def test_states_are_counted_until_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each enters the second slice, and is gone with its gradient once the first has that."""
    meter = ActivationMeter()
    monkeypatch.setattr(STORE, "meter", meter)
    new = torch.ones(6, requires_grad=True)
    sequence = Sequence(Owner(0, 0), 6)
    outputs = [recurrence(sequence, new[start : start + 3], start).sum() for start in (0, 3)]
    assert (meter.live_bytes, meter.live_microbatches) == ((2 + 1) * 4, 1)
    outputs.pop().backward()
    assert {key: sorted(state.owed) for key, state in sequence.states.items()} == {"tail": [3], "state": [3]}
    outputs.pop().backward()
    del sequence
    assert meter.live_bytes == 0


def test_a_layer_with_a_state_is_called_once_for_each_slice() -> None:
    sequence, new = Sequence(Owner(0, 0), 4), torch.ones(2)
    recurrence(sequence, new, 0)
    with pytest.raises(ValueError, match="called twice for a slice"):
        recurrence(sequence, new, 0)
    sequence.end_forward(2)
    with pytest.raises(ValueError, match="for some slices of a sequence alone"):
        sequence.entered("another", 2, new)
    with pytest.raises(ValueError, match="for some slices of a sequence alone"):
        sequence.end_forward(4)
