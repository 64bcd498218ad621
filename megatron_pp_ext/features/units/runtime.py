"""The keys and values of earlier slices, the states of recurrences, and the gradients that slices owe them.

Every attention layer keeps one storage for the keys and one for the values of a sequence.  The forward of a
slice writes its own part, and attention gets a view from the first token to the slice's last: no prefix is
copied.  The backwards of slices run in reverse.  That of a later slice gives gradients of all keys that it
has read; those of earlier slices are summed until the backwards of these take them up.  A recurrence hands
its state to the next slice in the same way, and the gradient of that state goes to the slice before.  So only
the forward and the input gradient of a slice touch what slices share, and weight gradients may run at any
time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.setting_error import SettingError

_ONCE = (
    "and slices of sequences need one call of each layer in every forward; leave out --pipeline-slice-tokens"
)


class Prefix:
    """The keys, or the values, of one layer and one sequence of ``length`` tokens, along dimension 0.

    Those up to token ``written`` are there; the first forward comes at ``start``.
    """

    def __init__(self, owner: Owner, like: torch.Tensor, length: int, start: int) -> None:
        self.kept = torch.empty(length, *like.shape[1:], dtype=like.dtype, device=like.device)
        self.owed: torch.Tensor | None = None
        self.written = start
        self._owner = owner
        self._count(self.kept)

    def write(self, new: torch.Tensor, start: int) -> torch.Tensor:
        """Put ``new`` at token ``start``, and return a view of all up to its end.

        ValueError where a forward has been here.  A backward may recompute what is there.
        """
        end = start + len(new)
        if start != self.written and torch._C._current_graph_task_id() == -1:
            raise SettingError(f"a layer was called twice for a slice, {_ONCE}")
        self.kept[start:end].copy_(new)
        self.written = max(end, self.written)
        # With a version counter of its own: later slices write to the storage while this view is saved.
        return self.kept.data[:end]

    def owe(self, gradient: torch.Tensor) -> None:
        """Add ``gradient``, of the keys from the first token on, to what earlier slices will take up.

        Sums are in fp32, as those of a whole sequence are within attention.
        """
        if self.owed is None:
            self.owed = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            self._count(self.owed)
        else:
            self.owed[: len(gradient)] += gradient

    def _count(self, tensor: torch.Tensor) -> None:
        if STORE.meter is not None:
            STORE.meter.hold(self._owner, tensor, holder=self)


class _Grow(torch.autograd.Function):
    """Writes a slice's keys after the earlier ones, and returns a view of all."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", *inputs: object) -> torch.Tensor:
        new, prefix, start = inputs
        assert isinstance(new, torch.Tensor) and isinstance(prefix, Prefix) and isinstance(start, int)
        ctx.prefix, ctx.start, ctx.end = prefix, start, start + len(new)  # type: ignore[attr-defined]
        return prefix.write(new, start)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: torch.Tensor) -> object:
        (gradient,) = gradients
        prefix, start, end = ctx.prefix, ctx.start, ctx.end  # type: ignore[attr-defined]
        # An input that waits for its W keeps the graph behind it, which must not keep the storage.
        ctx.prefix = None  # type: ignore[attr-defined]
        result = gradient[start:]
        if prefix.owed is not None:
            result = (result + prefix.owed[start:end]).to(gradient.dtype)
        if start:
            prefix.owe(gradient[:start])
        return result, None, None


class State:
    """The numbers that a layer hands from each slice of a sequence to the next, as a recurrence its state.

    ``entering`` has those with which a slice begins, by its first token, from the forward of the slice before
    to its own input gradient: a layer that is recomputed there begins with them again.  ``owed`` has their
    gradients until the slice before takes them up.  The slices up to token ``written`` have handed theirs on.
    """

    def __init__(self, owner: Owner) -> None:
        self.entering: dict[int, torch.Tensor] = {}
        self.owed: dict[int, torch.Tensor] = {}
        self.written = 0
        self._owner = owner

    def keep(self, state: torch.Tensor, end: int) -> None:
        """Copy the ``state`` of the slice at token ``end``: it may be a view of all that a layer computed."""
        self.entering[end] = self._counted(state.detach().clone())

    def owe(self, gradient: torch.Tensor, start: int) -> None:
        """Note the ``gradient`` of what entered the slice at token ``start``, which is done with that."""
        del self.entering[start]
        self.owed[start] = self._counted(gradient)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        if STORE.meter is not None:
            STORE.meter.hold(self._owner, tensor, holder=tensor)
        return tensor


class _Enter(torch.autograd.Function):
    """Returns the state with which a slice begins; ``graph`` is any tensor from which the layer computes."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", *inputs: object) -> torch.Tensor:
        graph, state, start = inputs
        assert isinstance(graph, torch.Tensor) and isinstance(state, State) and isinstance(start, int)
        ctx.state, ctx.start = state, start  # type: ignore[attr-defined]
        return state.entering[start].detach()

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: torch.Tensor) -> object:
        (gradient,) = gradients
        ctx.state.owe(gradient, ctx.start)  # type: ignore[attr-defined]
        return None, None, None


class _HandOn(torch.autograd.Function):
    """Returns the ``result`` of a layer, whose backward takes up the gradient of the state after it."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", *inputs: object) -> torch.Tensor:
        result, _, state, end = inputs
        assert isinstance(result, torch.Tensor) and isinstance(state, State)
        ctx.state, ctx.end = state, end  # type: ignore[attr-defined]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *gradients: torch.Tensor) -> object:
        (gradient,) = gradients
        return gradient, ctx.state.owed.pop(ctx.end, None), None, None  # type: ignore[attr-defined]


@dataclass(slots=True)
class Sequence:
    """The state that slices of one sequence of ``length`` tokens share on a stage; the first is ``owner``."""

    owner: Owner
    length: int
    prefixes: dict[object, Prefix] = field(default_factory=dict)
    states: dict[object, State] = field(default_factory=dict)
    forwarded: int = 0
    """The tokens of the slices that have gone forward."""
    counts: dict[object, int] = field(default_factory=dict)
    """The calls of layers that a forward calls several times, by layer, slice and direction."""

    def grown(self, key: object, new: torch.Tensor, start: int, calls: int = 1) -> torch.Tensor:
        """Return a view of the first tokens up to the end of ``new``, which begins at token ``start``.

        ``key`` names the layer and what it keeps, and ``calls`` are those of the layer in a forward.  A
        forward that recomputation repeats writes the same numbers again.  ValueError unless each layer is
        called as often for each slice.
        """
        key = (key, self._number(key, start, calls)) if calls > 1 else key
        if key not in self.prefixes:
            if self.forwarded:
                raise self._skipped()
            self.prefixes[key] = Prefix(self.owner, new, self.length, start)
        grown: torch.Tensor = _Grow.apply(new, self.prefixes[key], start)
        return grown

    def _number(self, key: object, start: int, calls: int) -> int:
        """Return the number of a layer's call in a slice's forward; recomputation begins at the last."""
        is_again = torch._C._current_graph_task_id() != -1
        place = key, start, is_again
        number = self.counts[place] = self.counts.get(place, -1) + 1
        return calls - 1 - number if is_again else number

    def entered(self, key: object, start: int, graph: torch.Tensor, calls: int = 1) -> torch.Tensor | None:
        """Return the state with which the slice from token ``start`` on begins; None for the first slice.

        ``key`` names the layer and what it hands on, and ``calls`` are those of the layer in a forward.  The
        layer computes from the tensor ``graph``, so that the state's gradient comes with that of the layer.
        ValueError where an earlier slice left it out.
        """
        if not start:
            return None
        if calls > 1:
            key = key, self._number((key, "entered"), start, calls)
        if key not in self.states or start not in self.states[key].entering:
            raise self._skipped()
        entered: torch.Tensor = _Enter.apply(graph, self.states[key], start)
        return entered

    def handed_on(
        self, key: object, new: torch.Tensor, end: int, result: torch.Tensor, calls: int = 1
    ) -> torch.Tensor:
        """Hand the state ``new`` after token ``end`` to the next slice, and return the layer's ``result``.

        The backward from that result takes up the gradient of the state.  A forward that recomputation
        repeats hands nothing on.  ValueError unless each layer is called as often for each slice.
        """
        if calls > 1:
            key = key, self._number((key, "handed on"), end, calls)
        if key not in self.states:
            if self.forwarded:
                raise self._skipped()
            self.states[key] = State(self.owner)
        state = self.states[key]
        if end > state.written:
            state.written = end
            if end < self.length:
                state.keep(new, end)
        elif self.forwarded < end:
            raise SettingError(f"a layer was called twice for a slice, {_ONCE}")
        if end == self.length:
            return result
        handed_on: torch.Tensor = _HandOn.apply(result, new, state, end)
        return handed_on

    def end_forward(self, end: int) -> None:
        """Note that the slice up to token ``end`` went forward; ValueError for a layer that it left out."""
        ends = {prefix.written for prefix in self.prefixes.values()}
        ends |= {state.written for state in self.states.values()}
        if not ends <= {end}:
            raise self._skipped()
        self.forwarded = end

    @staticmethod
    def _skipped() -> ValueError:
        return ValueError(f"a layer was called for some slices of a sequence alone, {_ONCE}")


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of a unit that this rank of a context-parallel ``group`` has.

    Of the unit's tokens, in their order, each rank has as many, one rank after the other.  ``ranges`` are
    their places among the ``total`` that the rank has of the microbatch, ``places`` those among all.
    """

    group: dist.ProcessGroup
    places: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int], ...]
    total: int

    @property
    def ranks(self) -> int:
        """The context-parallel ranks."""
        return self.group.size()

    def of(self, tokens: int) -> tuple[int, int]:
        """Return where the part of this rank begins and ends among the ``tokens`` of the unit."""
        rank, ranks = self.group.rank(), self.group.size()
        return rank * tokens // ranks, (rank + 1) * tokens // ranks


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens from ``start`` to ``end`` of a sequence, while a stage works on them.

    ``sequence`` is what its slices share, None where it is whole.  A pack of several whole sequences starts
    at 0, too.  ``ranges`` are the places of the tokens among the ``total`` of the microbatch.
    ``sizes`` are the tokens of each sequence of a pack; they are empty where it is not known which sequences
    the microbatch has.  ``share`` is this rank's part of it, None where the rank has all.
    """

    sequence: Sequence | None
    start: int
    end: int
    ranges: tuple[tuple[int, int], ...]
    total: int
    sizes: tuple[int, ...] = ()
    share: Share | None = None

    @property
    def ranges_here(self) -> tuple[tuple[int, int], ...]:
        """The places of the tokens that this rank has, among those of the microbatch that it has."""
        return self.ranges if self.share is None else self.share.ranges

    @property
    def total_here(self) -> int:
        """The tokens of the microbatch that this rank has."""
        return self.total if self.share is None else self.share.total


_running: Slice | None = None


def running() -> Slice | None:
    """Return the slice that this rank works on; None where what it works on is no slice.

    An ordinary variable: on a GPU autograd recomputes layers in a thread of its own.
    """
    return _running


@contextmanager
def at_work_on(part: Slice) -> Iterator[None]:
    """Make ``part`` the slice that this rank works on."""
    global _running
    before, _running = _running, part
    try:
        yield
    finally:
        _running = before
