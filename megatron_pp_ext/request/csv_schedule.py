"""A schedule from a file, and whether Megatron can train with it."""

from pathlib import Path

from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.check import require_one_forward_order


def read_csv(path: Path, ranks: int, first_first: bool) -> Schedule:
    """Read a schedule that ``mpp schedule --csv``, a person or torch.distributed.pipelining wrote.

    Raises ValueError if the file is not a valid schedule for ``ranks`` ranks, if its ranks share the
    vocabulary, if its stages take the microbatches forward in different orders, or, with ``first_first``, if
    ``require_first_first`` does.
    """
    schedule = csv_file.read(path)
    if schedule.ranks != ranks:
        raise ValueError(
            f"{path} is a schedule for {schedule.ranks} ranks, got --pipeline-model-parallel-size {ranks}; "
            "set one to the other"
        )
    if schedule.placement.shares_vocabulary:
        raise ValueError(
            f"the ranks of {path} share the vocabulary, which mpp simulates but training cannot do; write "
            "the schedule without --shared-vocabulary"
        )
    require_one_forward_order(schedule)
    if first_first:
        require_first_first(schedule)
    return schedule


def require_microbatches(schedule: Schedule, path: str, microbatches: int) -> None:
    """ValueError unless the schedule of the file ``path`` is for ``microbatches`` microbatches."""
    if microbatches != schedule.microbatches:
        raise ValueError(
            f"{path} is a schedule for {schedule.microbatches} microbatches, but this step has "
            f"{microbatches}; set --global-batch-size accordingly"
        )


def require_first_first(schedule: Schedule) -> None:
    """Raise ValueError unless each stage begins with microbatch 0, its forwards and its weight gradients.

    Under Transformer Engine ``is_first_microbatch`` is true of a module's first forward ever and, where
    layers quantize (FP8, FP4, --te-precision-config-file), of microbatch 0's in every step.  That forward
    casts the weights, which later ones rely on; and where accumulation is fused its weight gradient
    overwrites ``main_grad``, to which those of others are added (``accumulate`` in Transformer Engine's
    module/linear.py, layernorm_linear.py and grouped_linear.py, the same from 2.3 to 2.18; Megatron's
    extensions/transformer_engine.py).
    """
    for rank, order in enumerate(schedule.orders):
        begun: set[tuple[int, bool]] = set()
        for action in order:
            is_forward = action.kind is Kind.F
            if action.kind is Kind.I or (action.stage, is_forward) in begun:
                continue
            begun.add((action.stage, is_forward))
            if action.microbatch != 0:
                raise ValueError(
                    f"schedule {schedule.name!r}: rank {rank} runs {action} before microbatch 0's "
                    f"{'forward' if is_forward else 'weight gradient'}, but Transformer Engine "
                    f"{'casts weights' if is_forward else 'overwrites earlier gradients'} in the latter; put "
                    "microbatch 0 first, or add --transformer-impl local"
                )
