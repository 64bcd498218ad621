"""Where a training run's schedules come from: the catalogue, a file, or the compiler.

The placement is settled with the arguments, since the model is built by it; the schedule itself is
made when a step first asks for its number of microbatches.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from filelock import FileLock

from megatron_pp_ext.compiler.compile import compile_schedule, least_limits, placements_of
from megatron_pp_ext.compiler.limits import asked_for
from megatron_pp_ext.compiler.search import cache
from megatron_pp_ext.integration.hooks.engine_linear import require_first_first
from megatron_pp_ext.integration.request import layer_cut
from megatron_pp_ext.integration.request.model_costs import estimate
from megatron_pp_ext.schedule import catalog, costs_file, csv_file
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.check import require_one_forward_order
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.simulate import simulate

CSV_PREFIX = "csv:"
DEVICE_MARGIN = 0.9
"""What ``auto`` uses of the memory it finds free: allocators fragment, and kernels need room."""


Limits = Callable[[Costs, Schedule, Callable[[], float]], tuple[float | Sequence[float], Costs]]
"""(measured costs, the schedule in force, free bytes) -> bytes that every rank, or each of them, may keep.

And the costs that these count: without messages where only activations are limited.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A schedule for any number of microbatches, all with one placement.

    ``build(microbatches, free_bytes)`` makes it; ``free_bytes()`` asks every rank of the pipeline what
    memory its device has left.  It is None in the first training step, before whose end the
    optimizer has not allocated its state.
    """

    name: str
    placement: Placement
    splits_backward: bool
    build: Callable[[int, Callable[[], float] | None], Schedule]
    limits: Limits | None = None
    """What a better schedule may keep; None where there is to be none but the one asked for."""


def from_catalogue(name: str, placement: Placement) -> Source:
    """A named family."""

    def build(microbatches: int, free_bytes: Callable[[], float] | None) -> Schedule:
        return catalog.build(name, placement.ranks, microbatches, placement.chunks)

    def limits(
        costs: Costs, schedule: Schedule, free_bytes: Callable[[], float]
    ) -> tuple[Sequence[float], Costs]:
        """Each rank's own peak, so that memory does not rise; a rank without layers keeps nothing."""
        return [max(1.0, peak) for peak in simulate(schedule, costs).peak_memory], costs

    example = catalog.build(name, placement.ranks, 1, placement.chunks)
    return Source(name, placement, example.splits_backward, build, limits)


def never_flushing(name: str, ranks: int) -> Source:
    """1F1B without its flush; what is built tells only the order, and how much is in flight."""

    def build(microbatches: int, free_bytes: Callable[[], float] | None) -> Schedule:
        return catalog.build("1f1b", ranks, max(microbatches, ranks))

    return Source(name, Placement(Shape.LINEAR, ranks), False, build)


def from_file(path: Path, ranks: int, first_first: bool = False) -> Source:
    """A schedule written by ``mpp schedule --csv``, by hand, or by torch.distributed.pipelining.

    Raises ValueError if the file is not a valid schedule for ``ranks`` ranks, if its stages take the
    microbatches forward in different orders, or, with ``first_first``, if a stage begins its forwards or its
    weight gradients with another microbatch than 0.
    """
    schedule = csv_file.read(path)
    if schedule.ranks != ranks:
        raise ValueError(
            f"{path} is a schedule for {schedule.ranks} ranks, got --pipeline-model-parallel-size {ranks}; "
            "set one to the other"
        )
    require_one_forward_order(schedule)
    if first_first:
        require_first_first(schedule)

    def build(microbatches: int, free_bytes: Callable[[], float] | None) -> Schedule:
        if microbatches != schedule.microbatches:
            raise ValueError(
                f"{path} is a schedule for {schedule.microbatches} microbatches, but this step has "
                f"{microbatches}; set --global-batch-size accordingly"
            )
        return schedule

    return Source(f"{CSV_PREFIX}{path}", schedule.placement, schedule.splits_backward, build)


def compiled(
    args: Namespace, chunks: int, microbatches: int, placements: Sequence[Placement] | None
) -> Source:
    """The compiler's best schedule within a memory limit: ``flex``, or ``auto`` for what the device has.

    ``chunks`` is the finest cut of the model that Megatron can make, ``microbatches`` those of an
    ordinary step.  The placement is the one that suits these best under ``flex``.  ``auto`` stays
    with a V: it runs the first step in the least memory there is and learns its limit after that.
    """
    ranks = args.pipeline_model_parallel_size
    costs = _costs(args, ranks * chunks)
    if args.pipeline_schedule == "auto":
        placement = Placement(Shape.V, ranks, 2) if chunks % 2 == 0 else Placement(Shape.LINEAR, ranks)
        limit, counted = None, costs
    else:
        limit, counted = _limit(args.pipeline_memory_limit, ranks, microbatches, costs)
        placement = compile_once(ranks, microbatches, counted, limit, placements).placement

    least = max(least_limits(ranks, costs, placement))

    def build(step_microbatches: int, free_bytes: Callable[[], float] | None) -> Schedule:
        kept = limit
        if kept is None:
            kept = least if free_bytes is None else max(least, free_bytes())
        return compile_once(ranks, step_microbatches, counted, kept, [placement])

    def limits(measured: Costs, schedule: Schedule, free_bytes: Callable[[], float]) -> tuple[float, Costs]:
        if args.pipeline_schedule == "auto":
            return max(*least_limits(ranks, measured, placement), free_bytes()), measured
        return _limit(args.pipeline_memory_limit, ranks, microbatches, measured)

    return Source(args.pipeline_schedule, placement, True, build, limits)


def candidate_placements(args: Namespace, chunks: int) -> Sequence[Placement] | None:
    """A layout or a hybrid pattern fixes the number of stages; otherwise any cut will do.

    So do layers of their own for the first or last rank, which have no meaning under a V.
    """
    given_ends = layer_cut.has_given_ends(args)
    if layer_cut.stages_asked_for(args) is None and not given_ends:
        return None
    ranks = args.pipeline_model_parallel_size
    every = placements_of(ranks, Costs.unit(Placement(Shape.LOOP, ranks, chunks)))
    return [
        placement
        for placement in every
        if placement.chunks == chunks and not (given_ends and placement.is_mirrored(chunks - 1))
    ]


def compile_once(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float | Sequence[float],
    placements: Sequence[Placement] | None,
) -> Schedule:
    """Compile on one rank of a machine at a time: the first one works, the others find it in the cache."""
    folder = cache.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "compiling.lock"):
            found = compile_schedule(ranks, microbatches, costs, limit, placements=placements)
    except OSError:
        # Without a place to keep schedules every rank works one out, the same one.
        found = compile_schedule(ranks, microbatches, costs, limit, placements=placements)
    return found.timeline.schedule


def _costs(args: Namespace, stages: int) -> Costs:
    if args.pipeline_costs is None:
        return estimate(args, stages)
    return costs_file.read(args.pipeline_costs, stages)


def _limit(asked: float, ranks: int, microbatches: int, costs: Costs) -> tuple[float, Costs]:
    """What ``schedule.limits.asked_for`` says; ValueError for a limit that is none."""
    if asked <= 0:
        raise ValueError(
            f"--pipeline-memory-limit is {asked:g}, but must be above 0; give a fraction of 1F1B's peak "
            "on its first rank, such as 0.5, or a number of bytes"
        )
    return asked_for(asked, ranks, microbatches, costs)


def least_free_bytes() -> float:
    """What the fullest device of the job still has for a step, the margin taken off; collective.

    Of the job and not of a pipeline: ranks that share a stage's tensors must run the same schedule.
    Right after an optimizer step: then weights, gradients and optimizer state are allocated and
    activations and messages are not.
    """
    lowest = torch.tensor([free_bytes()], dtype=torch.float64, device="cuda")
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return DEVICE_MARGIN * float(lowest.item())


def free_bytes() -> int:
    """What this rank's device still has; on a CPU its share of the machine's memory."""
    if torch.accelerator.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
