"""Samples for batches that grow by --step-batch-size-schedule, where --train-iters counts the batches."""

from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.training import get_args

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.releases import CORE_0_18
from megatron_pp_ext.integration.workarounds.workaround import Workaround

WORKAROUND = Workaround(
    "--step-batch-size-schedule with --train-iters",
    "since 0.18",
    "tests/integration/test_training_loop.py::test_data_last_while_batches_grow",
)


@hook("megatron.training.training:get_train_valid_test_num_samples", "", WORKAROUND.defect, since=CORE_0_18)
def count_all_samples(stock: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return as many training samples as the run takes.

    Stock takes every batch to be one microbatch of each replica, and a run ends in the middle when its data
    are used up.
    """
    args = get_args()
    training, *others = stock()
    grows = getattr(args, "step_batch_size_schedule", None) is not None
    if not grows or args.train_samples or args.phase_transition_iterations:
        return (training, *others)
    samples = 0
    for _ in range(args.train_iters):
        update_num_microbatches(samples, consistency_check=False)
        samples += get_current_global_batch_size()
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    return (samples, *others)
