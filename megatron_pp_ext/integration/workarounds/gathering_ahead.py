"""Weights that are gathered ahead of their use, --overlap-param-gather, while fp16 still skips steps.

Megatron puts the hooks that wait for the weights in place after the first step that is not skipped, and takes
them away around each evaluation and each checkpoint. One of these may come earlier, since the loss scale
begins so high that the first steps overflow: then it looks for hooks that are not there, which is a KeyError.
"""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

WORKAROUND = Workaround(
    "--overlap-param-gather with an evaluation or a checkpoint while fp16 skips steps",
    EVERY,
    "tests/integration/test_training_loop.py::test_evaluation_while_fp16_skips_steps",
)

_REPLICATED = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"


@hook(f"{_REPLICATED}.enable_forward_pre_hook", "self", WORKAROUND.defect)
def put_once(stock: Callable[[Any], None], self: Any) -> None:
    """Leave hooks that are in place as they are."""
    if not self.remove_forward_pre_hook_handles:
        stock(self)


@hook(f"{_REPLICATED}.disable_forward_pre_hook", "self param_sync", WORKAROUND.defect)
def take_what_is_there(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing where no hooks are in place: no step has changed the weights, which are whole."""
    if self.remove_forward_pre_hook_handles:
        stock(self, *args, **kwargs)
