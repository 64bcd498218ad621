"""A schedule from a file, and whether Megatron can train with it."""

from collections import defaultdict
from pathlib import Path

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.check import require_one_forward_order
from megatron_pp_ext.schedule.formats import csv_file


def read_csv(path: Path, asked: RequestedJob) -> Schedule:
    """Read a schedule that ``mpp schedule --csv``, a person or torch.distributed.pipelining wrote.

    Raises ValueError if the file is not a valid schedule for as many ranks as were ``asked`` for, if these
    split the head, if its stages take the microbatches forward in different orders, or if the layers
    cannot follow its order (``require_first_first``, ``require_backwards_in_order``).
    """
    schedule, ranks = csv_file.read(path), asked.job.parallel.pipeline_model_parallel_size
    if schedule.ranks != ranks:
        raise ValueError(
            f"{path} is a schedule for {schedule.ranks} ranks, got --pipeline-model-parallel-size {ranks}; "
            "set one to the other"
        )
    require_plain(schedule, path)
    require_trainable(schedule, asked)
    return schedule


def require_plain(schedule: Schedule, path: Path) -> None:
    """Raise ValueError where the ranks of ``path`` split the head, or forwards have several orders."""
    if schedule.placement.splits_head:
        raise ValueError(
            f"the ranks of {path} split the head, which mpp simulates but training by a file cannot do; "
            "write the schedule with the head in the last stage, without S and T"
        )
    require_one_forward_order(schedule)


def require_trainable(schedule: Schedule, asked: RequestedJob) -> None:
    """Raise ValueError if the layers that were ``asked`` for cannot follow the order of ``schedule``."""
    if asked.job.precision.transformer_impl == "transformer_engine":
        require_first_first(schedule)
    is_delayed = asked.job.precision.fp8 is not None and asked.precision.fp8_recipe == "delayed"
    if is_delayed and asked.job.memory.recompute_granularity is not None:
        require_backwards_in_order(schedule)


def require_batches(job: Job, schedule: Schedule, data: int) -> None:
    """ValueError unless every step of ``job`` on ``data`` ranks has the microbatches of ``schedule``."""
    batch, name = job.batch, job.pipeline.pipeline_schedule
    samples = batch.micro_batch_size * data
    if any(size // samples != schedule.microbatches for size in batch.sizes):
        flag = "--step-batch-size-schedule"
        growing = batch.global_batch_size is None
        batches = f"{flag} {batch.step_batch_size_schedule}"
        raise ValueError(
            f"--pipeline-schedule {name} has {schedule.microbatches} microbatches in every "
            f"step, but {batches if growing else f'--global-batch-size {batch.global_batch_size}'} requests "
            f"others; {f'leave {flag} out and ' if growing else ''}set --global-batch-size "
            f"{schedule.microbatches * samples}"
        )


def require_backwards_in_order(schedule: Schedule) -> None:
    """Raise ValueError unless each stage takes the microbatches backward as it took them forward.

    Where a module of Transformer Engine is to be computed again, it puts the scales of delayed scaling into
    a queue of its own at each forward, and takes them out first in, first out (``FP8GlobalStateManager``).
    In another order a microbatch would be computed again with the scales of another.
    """
    orders: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for action in schedule:
        if action.kind in (Kind.F, Kind.I, Kind.B):
            orders[action.stage, action.kind is Kind.F].append(action.microbatch)
    for stage in range(schedule.placement.stages):
        forward, backward = orders[stage, True], orders[stage, False]
        for first, second in zip(forward, backward, strict=True):
            if first != second:
                raise ValueError(
                    f"schedule {schedule.name!r}: stage {stage} takes microbatch {second} backward where "
                    f"{first} is the next that it took forward, but with --fp8-recipe delayed Transformer "
                    "Engine computes microbatches again in that order; give the backwards the order of the "
                    "forwards, choose another --fp8-recipe, or recompute nothing"
                )


def require_first_first(schedule: Schedule) -> None:
    """Raise ValueError unless each stage begins with microbatch 0, its forwards and its weight gradients.

    Under Transformer Engine ``is_first_microbatch`` is true of a module's first forward ever and, where
    layers quantize (FP8, FP4, --te-precision-config-file), of microbatch 0's in every step.  That forward
    casts the weights, which later ones rely on; and where accumulation is fused its weight gradient
    overwrites ``main_grad``, to which other gradients are added (``accumulate`` in Transformer Engine's
    module/linear.py, layernorm_linear.py and grouped_linear.py, the same from 2.3 to 2.18; Megatron's
    extensions/transformer_engine.py).
    """
    for rank, order in enumerate(schedule.orders):
        started: set[tuple[int, bool]] = set()
        for action in order:
            is_forward = action.kind is Kind.F
            if action.kind is Kind.I or (action.stage, is_forward) in started:
                continue
            started.add((action.stage, is_forward))
            if action.microbatch != 0:
                raise ValueError(
                    f"schedule {schedule.name!r}: rank {rank} runs {action} before microbatch 0's "
                    f"{'forward' if is_forward else 'weight gradient'}, but Transformer Engine "
                    f"{'casts weights' if is_forward else 'overwrites earlier gradients'} in the latter; put "
                    "microbatch 0 first, or add --transformer-impl local"
                )
