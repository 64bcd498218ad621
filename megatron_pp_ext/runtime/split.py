"""Splits the backward into two halves: input gradients, and weight gradients for later (arXiv 2401.10241)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_pp_ext.runtime.activation_meter import ActivationMeter


class Owner(NamedTuple):
    """The stage and the microbatch that tensors or deferred work belong to."""

    stage: int
    microbatch: int


class OwnPart:
    """The ``part`` that this rank has of a tensor of ``shape``, which a ``group`` divides along ``dim``.

    Of that dimension ``length`` entries are divided, all by default; those after them are padding, which
    comes back as zeros.

    Under sequence parallelism a weight gradient reads operands that were gathered from all tensor-parallel
    ranks. Between I and W a rank keeps its part alone, and the group gathers the tensor again in W: what
    waits is a ``1 / group.size()`` of it.  Bytes are cut and gathered, and never computed again, so that W
    reads what I had.
    """

    def __init__(
        self,
        part: torch.Tensor,
        group: dist.ProcessGroup,
        shape: torch.Size,
        dim: int = 0,
        length: int | None = None,
    ) -> None:
        self.part = part
        self._group, self._shape, self._dim = group, shape, dim
        self._length = shape[dim] if length is None else length
        self._under_way: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def cut(
        cls, whole: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, length: int | None = None
    ) -> "OwnPart":
        """Return this rank's part of ``whole``, copied: a view would keep all of its memory."""
        length = whole.shape[dim] if length is None else length
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        part = whole.narrow(dim, rank * (length // ranks), length // ranks)
        return cls(part.clone(memory_format=torch.contiguous_format), group, whole.shape, dim, length)

    @property
    def parts(self) -> "tuple[OwnPart, ...]":
        """The part itself: an operand of several tensors has one for each."""
        return (self,)

    def start(self) -> None:
        """Launch the gather, unless it is under way."""
        if self._under_way is not None:
            return
        is_padded = self._length != self._shape[self._dim]
        whole = (torch.zeros if is_padded else torch.empty)(
            self._shape, dtype=self.part.dtype, device=self.part.device
        )
        # A gather fills whole rows; along another dimension the parts lie one after the other, to be moved.
        if self._dim == 0:
            gathered = whole.narrow(0, 0, self._length)
        else:
            gathered = self.part.new_empty((dist.get_world_size(self._group), *self.part.shape))
        work = dist.all_gather_into_tensor(
            gathered.view(-1, *self.part.shape[1:]), self.part, group=self._group, async_op=True
        )
        assert work is not None
        self._under_way = work, whole, gathered

    def take(self) -> torch.Tensor:
        """Return the whole tensor, once its gather is done; launch it now where nobody has."""
        self.start()
        assert self._under_way is not None
        work, whole, gathered = self._under_way
        self._under_way = None
        work.wait()
        if self._dim:
            divided = whole.narrow(self._dim, 0, self._length)
            divided.unflatten(self._dim, (len(gathered), -1)).copy_(gathered.movedim(0, self._dim))
        return whole


WeightWork = Callable[[], None]
"""Computes one weight's gradient and adds it where it belongs."""


class Layer(Enum):
    """The state of a layer's input gradient in I, when its weight gradient is left for W."""

    SENDS = auto()
    """It is on its way to other tensor-parallel ranks, as in a column-parallel layer."""
    SENDS_NOTHING = auto()
    """It is complete, as in a row-parallel layer."""
    IS_EXPERT = auto()
    """It is complete, and its tokens go back to the ranks that they came from."""


class _Product(NamedTuple):
    """Deferred ``work`` of a ``layer``, which gathers ``parts`` again.

    ``is_free`` is true where the work may run before other weights' work that was left earlier.
    """

    work: WeightWork
    parts: Sequence[OwnPart]
    layer: Layer
    is_free: bool


class WeightGradientStore:
    """Keeps the work that the W actions of a rank still have to do.

    Layers call ``defer`` in their backward.  Inside ``collecting`` the work is kept for that
    slot; outside, ``defer`` runs it at once, so a layer needs no second code path for
    schedules that do not split.

    Work may read operands of which only this rank's part was kept (``OwnPart``).  Their gathers are launched
    before earlier work, so that they travel while that computes.

    The autograd engine may call from a thread of its own (it has one for each GPU), while the
    thread that entered ``collecting`` waits for it: the open slot is therefore an ordinary
    attribute, neither thread-local nor locked.

    ``meter``, where it is set, counts the tensors that deferred work holds on to.

    A linear layer's backward computes two products that do not need each other: the gradient of its input,
    for which the previous stage is waiting, and the gradient of its weight, which is not needed before the
    optimizer step.  Schedules that run the second one later (arXiv 2401.10241, section 2) cut the backward at
    the linear layers: when the autograd engine reaches one, the layer returns its input's gradient at once
    and leaves the weight's as work in the store, to be run by the W action of the same stage and microbatch.

    Everything else (norms, embeddings, biases, routers) stays in the first half: it is cheap, and cutting it
    would keep activations alive for nothing.
    """

    def __init__(self) -> None:
        self.meter: ActivationMeter | None = None
        self._slot: Owner | None = None
        self._beside: Owner | None = None
        self._runs_in_parts = self._has_sent = self._is_captured = False
        self._work: dict[Owner, deque[_Product]] = {}

    @property
    def is_collecting(self) -> bool:
        """Whether the backward that runs now is the first half of a split one."""
        return self._slot is not None

    @property
    def runs_soon(self) -> bool:
        """Whether work runs within the backward that leaves it, so that its operands may stay whole."""
        return self._slot is not None and (self._runs_in_parts or self._beside == self._slot)

    @contextmanager
    def collecting(self, slot: Owner, in_parts: bool = False, captured: bool = False) -> Iterator[None]:
        """Keep for ``slot`` the weight gradients that are deferred inside.

        With ``in_parts`` they do not outlive the context: each ``run_part`` inside runs those that are there,
        and the end runs the others.  If ``captured``, only what a CUDA graph records is kept: backwards that
        warm up run all their work.
        """
        if self._slot is not None:
            raise RuntimeError(f"{slot} cannot collect weight gradients while {self._slot} does")
        if slot in self._work:
            raise RuntimeError(f"{slot} has weight gradients from an earlier backward that never ran")
        self._slot, self._runs_in_parts, self._has_sent = slot, in_parts, False
        self._is_captured = captured
        self._work[slot] = deque()
        try:
            self._start_beside()
            yield
            self.run_part()
            self._run_what_stays_whole()
        finally:
            self._slot, self._runs_in_parts, self._is_captured = None, False, False
            if in_parts:
                del self._work[slot]

    @contextmanager
    def beside(self, slot: Owner) -> Iterator[None]:
        """Run work of ``slot`` while messages of the backward that collects inside are under way.

        Each message of tensor parallelism hides one piece of work: first of layers which sent none
        themselves, such as row-parallel ones, whose products are smaller.  Each exchange of tokens hides the
        work of one expert layer.  ``slot`` may be the one that collects; otherwise its own backward has
        ended.  The remaining work runs in its W as ever.
        """
        self._beside = slot
        try:
            yield
        finally:
            self._beside = None

    def run_part(self) -> None:
        """Run the work so far of the slot that collects in parts, if there is one."""
        if self._slot is not None and self._runs_in_parts:
            _run(self._work[self._slot])

    def defer(
        self,
        work: WeightWork,
        *tensors: torch.Tensor,
        parts: Sequence[OwnPart] = (),
        layer: Layer = Layer.SENDS_NOTHING,
        is_free: bool = True,
    ) -> None:
        """Leave ``work``, which holds on to ``tensors``, for the W of the slot that is collecting.

        It gathers ``parts`` again, and is of a ``layer``.  Work on a weight with a second use, whose
        gradient comes in I, is not ``is_free``: it runs in W alone, after all that I adds to the same sum.

        It will run under the autocast of this moment, which the layer's backward has restored.  Where no slot
        is collecting, and while graphs warm up, run it now.
        """
        warms_up = self._is_captured and not torch.cuda.is_current_stream_capturing()
        if self._slot is None or warms_up:
            work()
            return
        work = _under_present_autocast(work)
        self._work[self._slot].append(_Product(work, parts, layer, is_free))
        if self.meter is not None:
            for tensor in tensors:
                self.meter.hold(self._slot, tensor, holder=work)
        if layer is Layer.SENDS:
            self._has_sent = True
            self._run_beside(self._beside_message())
        else:
            self._start_beside()

    @property
    def hides_exchanges(self) -> bool:
        """Whether an exchange of tokens that is launched now would have work to hide it."""
        return self._slot is not None and self._beside_exchange() is not None

    def hide_exchange(self) -> None:
        """Run work of an expert layer while an exchange of tokens is under way; the caller waits for that."""
        self._run_beside(self._beside_exchange())

    def _start_beside(self) -> None:
        """Launch the gathers of the next hidden product; launched after the message, they would wait."""
        if self._beside != self._slot and (product := self._beside_message()) is not None:
            _start(product)

    def _run_beside(self, product: _Product | None) -> None:
        if product is None or self._beside is None:
            return
        # Not by equality, which compares tensors.
        work = self._work[self._beside]
        del work[next(place for place, other in enumerate(work) if other is product)]
        _run(deque([product]))

    def _lent(self, layer: Layer) -> _Product | None:
        """Return the first work that may run now, of layers of this kind."""
        if self._beside is None:
            return None
        work = self._work.get(self._beside, ())
        return next((product for product in work if product.is_free and product.layer is layer), None)

    def _beside_message(self) -> _Product | None:
        """Return the work that a message of tensor parallelism hides.

        No product of a layer of this very slot that sends, whose own message is the one to be hidden.
        """
        silent = self._lent(Layer.SENDS_NOTHING)
        return silent if silent is not None or self._beside == self._slot else self._lent(Layer.SENDS)

    def _beside_exchange(self) -> _Product | None:
        return self._lent(Layer.IS_EXPERT)

    def _run_what_stays_whole(self) -> None:
        """Run the work of this very slot whose operands stayed whole, and which no message has hidden.

        Operands are whole for nothing where no layer sends a message.
        """
        if self._slot is not None and self._beside == self._slot and self._has_sent:
            while (product := self._lent(Layer.SENDS_NOTHING)) is not None:
                self._run_beside(product)

    def run(self, slot: Owner) -> None:
        """Run the work that ``slot`` left, in its order, and release its tensors one by one.

        KeyError if the slot's backward has not run.
        """
        _run(self._work.pop(slot))

    def abandon(self) -> None:
        """Drop all work of a step that failed, with the tensors that it holds.

        Gathers under way are not waited for, since other ranks may never launch theirs; the process group
        keeps their memory.
        """
        self._work.clear()
        self._slot, self._beside, self._runs_in_parts, self._is_captured = None, None, False, False

    def __len__(self) -> int:
        """Return the number of slots that still have work; it is 0 at the end of a step."""
        return len(self._work)


_AHEAD = 2
"""The number of products for which gathers are launched ahead.  A transformer's layer has two long ones and
two that are shorter than a gather, which the long ones therefore have to hide as well."""


def _under_present_autocast(work: WeightWork) -> WeightWork:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            work = torch.autocast(device, torch.get_autocast_dtype(device))(work)
    return work


@torch.no_grad()
def _run(work: deque[_Product]) -> None:
    """Run ``work`` from its first on, with the gathers of ``_AHEAD`` more under way."""
    while work:
        for product in islice(work, 1 + _AHEAD):
            _start(product)
        work.popleft().work()


def _start(product: _Product) -> None:
    for part in product.parts:
        part.start()


STORE = WeightGradientStore()
"""The store of this process.  A process is one rank, and nothing could pass a store to Megatron's layers."""


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks want to see the gradient of ``parameter``, which a W adds without autograd."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
