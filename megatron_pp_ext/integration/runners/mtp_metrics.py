"""The losses of multi-token prediction, for the log.

Stock sums them up in a tracker on the rank that has the last stage, and logs from the last rank. Under a V
these are two ranks.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def take() -> dict[str, torch.Tensor]:
    """What the microbatches since the last log entry summed up, taken out of this rank's tracker."""
    tracker = MTPLossLoggingHelper.tracker
    sums = [name for name, value in tracker.items() if isinstance(value, torch.Tensor)]
    return {name: tracker.pop(name) for name in sums}


def put(sums: dict[str, torch.Tensor]) -> None:
    """Make ``sums`` this rank's, to be averaged over the data-parallel ranks beside it."""
    if sums:
        average_over = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(sums, avg_group=average_over)
