"""Weights that are gathered ahead of their use, --overlap-param-gather, while fp16 still skips steps.

Megatron puts the hooks that wait for the weights in place after the first step that is not skipped, and takes
them away around each evaluation and each checkpoint. One of these may come earlier, since the loss scale
begins so high that the first steps overflow: then it looks for hooks that are not there, which is a KeyError.
"""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration.mends.mend import EVERY, Mend
from megatron_pp_ext.integration.releases import CORE_0_17


@around
def put_once(stock: Callable[[Any], None], self: Any) -> None:
    """Leave hooks that are in place as they are.

    Seam: ``DistributedDataParallel.enable_forward_pre_hook`` in
    ``megatron.core.distributed.distributed_data_parallel``.
    """
    if not self.remove_forward_pre_hook_handles:
        stock(self)


@around
def take_what_is_there(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing where no hooks are in place: no step has changed the weights, which are whole.

    Seam: ``DistributedDataParallel.disable_forward_pre_hook``, beside the other.
    """
    if self.remove_forward_pre_hook_handles:
        stock(self, *args, **kwargs)


_REPLICATED = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

MEND = Mend(
    "--overlap-param-gather with an evaluation or a checkpoint while fp16 skips steps",
    EVERY,
    "tests/integration/test_training_loop.py::test_evaluation_while_fp16_skips_steps",
    {
        f"{_REPLICATED}.enable_forward_pre_hook": ({CORE_0_17: "self"}, put_once),
        f"{_REPLICATED}.disable_forward_pre_hook": ({CORE_0_17: "self param_sync"}, take_what_is_there),
    },
)
