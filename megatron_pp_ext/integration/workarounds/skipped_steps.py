"""Training steps whose samples are passed over: Megatron's --iterations-to-skip."""

from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

WORKAROUND = Workaround(
    "--iterations-to-skip on every rank that reads samples, and on those that do not",
    EVERY,
    "tests/integration/test_single_features.py::test_a_skipped_step_passes_its_samples_over",
)


@hook("megatron.training.training:dummy_train_step", "data_iterator", WORKAROUND.defect)
def pass_over(stock: Callable[[Any], None], data_iterator: Any) -> None:
    """Drop a step's samples from every iterator that this rank has.

    Stock takes them from one iterator on tensor-parallel rank 0 and broadcasts them.  But a rank with several
    chunks has an iterator for each, a stage between the first and the last has none, and under
    ``megatron_pp_ext.pretrain_gpt`` every tensor-parallel rank reads.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches() if iterator is not None else 0):
                next(iterator)
