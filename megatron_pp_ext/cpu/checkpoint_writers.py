"""Fork the processes that write checkpoints from the ranks, and give them copies of the tensors.

Megatron starts these processes as fresh interpreters, each of which imports the training script and Megatron
again.  On a CPU that takes longer than the training of a small model, and these imports find no stand-ins for
torch.cuda.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pp_ext.cpu.orphans import leave_no_orphans

STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def fork_checkpoint_writers(argv: Sequence[str]) -> None:
    """Fork the processes that Megatron would start afresh, if ``argv`` saves checkpoints.

    These are the queue through which writers report and, for --async-save, the process that writes. Megatron
    keeps the first of each that is made, so it is enough to make them earlier. This has to be called before
    the process groups start their threads, so that the fork is safe. Nothing is replaced, and a Megatron that
    starts them in another way goes on doing so. They end with this process, however that ends.
    """
    flags = {word.partition("=")[0] for word in argv}
    if "--save" not in flags:
        return
    leave_no_orphans()
    writer = importlib.import_module(f"{STRATEGIES}.filesystem_async")
    _fork(getattr(writer, "get_write_results_queue", None))
    if {"--async-save", "--use-persistent-ckpt-worker"} <= flags:
        calls = importlib.import_module(f"{STRATEGIES}.async_utils").AsyncCallsQueue
        _fork(getattr(calls, "warmup_persistent_caller", None), rank=int(os.environ.get("RANK", "0")))


def _fork(start: Callable[..., Any] | None, **arguments: int) -> None:
    if start is not None and "mp_mode" in inspect.signature(start).parameters:
        start(mp_mode="fork", **arguments)


def copy_shared(preload: Callable[..., Any]) -> staticmethod:
    """Copy tensors for the process that writes in the background before training goes on.

    Moving a tensor from the GPU copies it. A tensor on the CPU stays where it is, in memory that the rank
    shares with the writing process and goes on updating: the checkpoint would hold a later step, or parts of
    several.  The rank waits for this.
    """

    @functools.wraps(preload)
    def preload_tensors(*args: Any, **kwargs: Any) -> list[Any]:
        return [
            (file, key, (others, [(item, _own(tensor)) for item, tensor in tensors]))
            for file, key, (others, tensors) in preload(*args, **kwargs)
        ]

    return staticmethod(preload_tensors)


def _own(tensor: Any) -> Any:
    return tensor.clone() if tensor.is_shared() else tensor
