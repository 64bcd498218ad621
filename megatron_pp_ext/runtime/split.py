"""Splits the backward into two halves.

A linear layer's backward computes two products that do not need each other: the gradient of
its input, for which the previous stage is waiting, and the gradient of its weight, which is not
needed before the optimizer step.  Schedules that run the second one later (arXiv 2401.10241,
section 2) cut the backward at the linear layers: when the autograd engine reaches one, the
layer returns its input's gradient at once and leaves the weight's as work in the store, to be
run by the W action of the same stage and microbatch.

Everything else (norms, embeddings, biases, routers) stays in the first half: it is cheap, and
cutting it would keep activations alive for nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, Owner

WeightWork = Callable[[], None]
"""Computes one weight's gradient and adds it where it belongs."""


class WeightGradientStore:
    """Keeps the work that the W actions of a rank still have to do.

    Layers call ``defer`` in their backward.  Inside ``collecting`` the work is kept for that
    slot; outside, ``defer`` runs it at once, so a layer needs no second code path for
    schedules that do not split.

    The autograd engine may call from a thread of its own (it has one for each GPU), while the
    thread that entered ``collecting`` waits for it: the open slot is therefore an ordinary
    attribute, neither thread-local nor locked.

    ``meter``, where it is set, counts the tensors that deferred work holds on to.
    """

    def __init__(self) -> None:
        self.meter: ActivationMeter | None = None
        self._slot: Owner | None = None
        self._runs_in_parts = False
        self._work: dict[Owner, list[WeightWork]] = {}

    @property
    def is_collecting(self) -> bool:
        """Whether the backward that runs now is the first half of a split one."""
        return self._slot is not None

    @contextmanager
    def collecting(self, slot: Owner, in_parts: bool = False) -> Iterator[None]:
        """Keep for ``slot`` the weight gradients that are deferred inside.

        With ``in_parts`` they do not outlive the context: each ``run_part`` inside runs those that are there,
        and the end runs the others.
        """
        if self._slot is not None:
            raise RuntimeError(f"{slot} cannot collect weight gradients while {self._slot} does")
        if slot in self._work:
            raise RuntimeError(f"{slot} has weight gradients from an earlier backward that never ran")
        self._slot, self._runs_in_parts = slot, in_parts
        self._work[slot] = []
        try:
            yield
            self.run_part()
        finally:
            self._slot, self._runs_in_parts = None, False
            if in_parts:
                del self._work[slot]

    def run_part(self) -> None:
        """Run what the slot that collects in parts has so far; nothing where none does."""
        if self._slot is not None and self._runs_in_parts:
            work = self._work[self._slot]
            self._work[self._slot] = []
            _run(work)

    def defer(self, work: WeightWork, *tensors: torch.Tensor) -> None:
        """Leave ``work``, which holds on to ``tensors``, for the W of the slot that is collecting.

        It will run under the autocast of this moment, which the layer's backward has restored.  Where no slot
        is collecting, run it now.
        """
        if self._slot is None:
            work()
            return
        work = _under_present_autocast(work)
        self._work[self._slot].append(work)
        if self.meter is not None:
            for tensor in tensors:
                self.meter.hold(self._slot, tensor, holder=work)

    def run(self, slot: Owner) -> None:
        """Run the work that ``slot`` left, in its order, and release its tensors one by one.

        KeyError if the slot's backward has not run.
        """
        _run(self._work.pop(slot))

    def abandon(self) -> None:
        """Drop all work of a step that failed, with the tensors that it holds."""
        self._work.clear()
        self._slot, self._runs_in_parts = None, False

    def __len__(self) -> int:
        """Return the number of slots that still have work; it is 0 at the end of a step."""
        return len(self._work)


def _under_present_autocast(work: WeightWork) -> WeightWork:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            work = torch.autocast(device, torch.get_autocast_dtype(device))(work)
    return work


@torch.no_grad()
def _run(work: list[WeightWork]) -> None:
    work.reverse()
    while work:
        work.pop()()


STORE = WeightGradientStore()
"""The store of this process.  A process is one rank, and nothing could pass a store to Megatron's layers."""


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks want to see the gradient of ``parameter``, which a W adds without autograd."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
