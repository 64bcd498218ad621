"""The sources of a training run's schedules: the catalogue, a file, and the compiler.

The placement is settled with the flags, since the model is built by it.  The schedule itself is made when
a step first needs one for its number of microbatches.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from filelock import FileLock, Timeout

from megatron_pp_ext.compiler.compile import TRIALS, compile_schedule
from megatron_pp_ext.compiler.limits import Limit, least_limits
from megatron_pp_ext.compiler.offloaded import compile_with_copies
from megatron_pp_ext.compiler.search import cache
from megatron_pp_ext.job.csv_schedule import require_microbatches
from megatron_pp_ext.job.offloading import with_copy_seconds
from megatron_pp_ext.job.request import Request
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO, CSV_PREFIX, FLEX
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import simulate

LONGEST_WAIT = 60.0
"""The seconds that a rank waits while another one compiles; then it compiles, too.

On a free core, schedules for up to 64 ranks and 512 microbatches take less (docs/compiler.md).
"""

FreeBytes = Callable[[], Sequence[float]]
"""Returns the bytes that every device of each pipeline rank has left for a step; collective."""

Limits = Callable[[Costs, Schedule, FreeBytes], tuple[float | Sequence[float], Costs]]
"""(measured costs, the schedule in force, free bytes) -> the bytes that all ranks, or each, may keep.

The costs that are returned beside them are those that the bytes count: without messages where only
activations are limited.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A schedule for any number of microbatches, all with one placement.

    ``build(microbatches, free_bytes)`` makes it.  ``free_bytes`` is None in the first training step, before
    whose end the optimizer has not allocated its state.  ``limits`` returns what a better schedule may keep;
    None where no other schedule may replace the requested one.  ``known`` is the schedule of an ordinary step
    where more than the flags decide on it: a file, or costs.  ``note`` is what people should know of it.
    ``kept_bytes`` are those that a forward of each stage keeps, where copies are planned in bytes.
    """

    name: str
    placement: Placement
    build: Callable[[int, FreeBytes | None], Schedule]
    limits: Limits | None = None
    known: Schedule | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)
    kept_bytes: tuple[float, ...] = field(default=(), compare=False)


def source_of(request: Request, costs_of: Callable[[int], Costs]) -> Source:
    """Return the source of ``request``'s schedules; ``costs_of(stages)`` returns the costs to compile from.

    Raises what ``compile_schedule`` raises where ``flex`` cannot keep its limit.
    """
    name = request.schedule
    can = catalog.abilities(name)
    if can.is_compiled:
        costs = costs_of(request.finest.stages)
        if request.offload == AUTO:
            costs = with_copy_seconds(costs)
        if not request.is_paired:
            costs = replace(costs, pair=1.0)
        return _automatic(request, costs) if can.measures_memory else _compiled(request, costs)
    if request.from_file is not None:
        return _from_file(request.from_file, name)
    if can.order is not None:
        return _never_flushing(name, can.order, request.placement)
    return from_catalogue(name, request.placement, request.is_paired)


def from_catalogue(name: str, placement: Placement, is_paired: bool = False) -> Source:
    """Return the source of a schedule of the catalogue, with pairs if ``is_paired``."""

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return catalog.build(name, placement.ranks, microbatches, placement.chunks, is_paired)

    def limits(costs: Costs, schedule: Schedule, free_bytes: FreeBytes) -> tuple[Sequence[float], Costs]:
        """Each rank's own peak, so that memory does not rise."""
        return simulate(schedule, costs).peak_memory, costs

    return Source(name, placement, build, limits)


def _never_flushing(name: str, order: str, placement: Placement) -> Source:
    """Return ``order`` without its flush; what is built shows only that and the microbatches in flight."""

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return catalog.build(order, placement.ranks, max(microbatches, placement.ranks))

    return Source(name, placement, build)


def _from_file(schedule: Schedule, name: str) -> Source:
    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        require_microbatches(schedule, name.removeprefix(CSV_PREFIX), microbatches)
        return schedule

    return Source(name, schedule.placement, build, known=schedule)


def _compiled(request: Request, costs: Costs) -> Source:
    """Return the source of ``flex``, whose placement is the one that suits an ordinary step best."""
    limit, counted = request.limited(costs)
    copies = request.offload == AUTO
    ordinary = compile_once(request.microbatches, counted, limit, request.placements, copies=copies)

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        if microbatches == request.microbatches:
            return ordinary
        return compile_once(microbatches, counted, limit, [ordinary.placement], copies=copies)

    def limits(measured: Costs, schedule: Schedule, free_bytes: FreeBytes) -> tuple[Limit, Costs]:
        return request.limited(measured)

    return Source(FLEX, ordinary.placement, build, limits, ordinary)


def _automatic(request: Request, costs: Costs) -> Source:
    """Return the source of ``auto``: least memory in the first step, and from the second on what is free.

    Ranks differ in what they have free: weights, optimizer state and the ends of the model are not alike.
    """
    placement = request.placement
    least = least_limits(costs, placement)

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        limit = least if free_bytes is None else tuple(map(max, least, free_bytes()))
        return compile_once(microbatches, costs, limit, [placement], copies=request.offload == AUTO)

    def limits(measured: Costs, schedule: Schedule, free_bytes: FreeBytes) -> tuple[Sequence[float], Costs]:
        return tuple(map(max, least_limits(measured, placement), free_bytes())), measured

    return Source(AUTO, placement, build, limits)


def compile_once(
    microbatches: int,
    costs: Costs,
    limit: float | Sequence[float],
    placements: Sequence[Placement],
    trials: int = TRIALS,
    copies: bool = False,
) -> Schedule:
    """Compile on one rank of a machine at a time: the first one works, the others read its result.

    With ``copies`` activations may wait on the host; these each rank plans by itself.
    """
    if copies:
        return compile_with_copies(microbatches, costs, limit, placements, trials, _in_turn).schedule
    ranks = placements[0].ranks
    found = compile_schedule(
        ranks, microbatches, costs, limit, placements=placements, trials=trials, turn=_in_turn
    )
    return found.timeline.schedule


@contextmanager
def _in_turn(name: str) -> Iterator[None]:
    """Wait until no other process compiles the schedule ``name`` of the cache, or for ``LONGEST_WAIT``.

    Who cannot wait compiles beside the others, since all get the same schedule: where there is no place to
    keep schedules, on file systems without locks, and behind a lock whose owner has died on another machine.
    """
    lock = FileLock(cache.directory() / f"{name}.lock", timeout=LONGEST_WAIT)
    problem = ""
    try:
        cache.directory().mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        problem = f"{lock.lock_file} was locked by another process for {LONGEST_WAIT:g} s"
    except (OSError, NotImplementedError) as error:  # the latter is filelock's where there is no flock
        problem = f"{lock.lock_file} cannot be locked ({getattr(error, 'strerror', None) or error})"
    log = logging.getLogger("megatron_pp_ext.compiler")
    level = log.level
    if problem and os.environ.get("LOCAL_RANK", "0") != "0":
        log.setLevel(logging.WARNING)  # the others beside the first one would all say the same
    elif problem:
        print(f"megatron_pp_ext: {problem}; the schedule is compiled without waiting for others", flush=True)
    try:
        yield
    finally:
        log.setLevel(level)
        lock.release()
