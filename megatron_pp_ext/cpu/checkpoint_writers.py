"""The processes that write checkpoints: forked from the ranks, and ended with their rank."""

import functools
import importlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pp_ext.around import bound

_reading = _writing = -1
"""A pipe that nobody writes to, open for writing in the first process alone; -1 is no such end."""


def leave_no_orphans() -> None:
    """Let every process that is forked from now on, however far from this one, end with this one.

    A rank that is killed does not stop the processes that it started. The one that writes checkpoints, and
    the one that keeps its results, would wait for ever for a rank that is gone. Linux can send such processes
    a signal when the rank ends, and other systems cannot, but all of them close the pipes of a process that
    ends.
    """
    global _reading, _writing
    if _reading < 0:
        _reading, _writing = os.pipe()
        os.register_at_fork(after_in_child=_end_with_the_first)


def _end_with_the_first() -> None:
    global _writing
    if _writing >= 0:
        os.close(_writing)
        _writing = -1
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    os.read(_reading, 1)
    os.kill(os.getpid(), signal.SIGKILL)  # a process may have inherited handlers of all other signals


STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def fork_checkpoint_writers(argv: Sequence[str]) -> None:
    """Fork the processes that Megatron would start afresh, if ``argv`` saves checkpoints.

    These are the queue through which writers report and, for --async-save, the process that writes. Megatron
    keeps the first of each that is made, so it is enough to make them earlier. This has to be called before
    the process groups start their threads, so that the fork is safe. Megatron ends the process that writes
    after the last step; the one that it makes for a checkpoint after that is forked, too. A Megatron that
    starts them in another way goes on doing so. They end with this process, however that ends.

    Megatron starts these processes as fresh interpreters, each of which imports the training script and
    Megatron again.  On a CPU that takes longer than the training of a small model, and these imports find no
    stubs of torch.cuda.
    """
    flags = {word.partition("=")[0] for word in argv}
    if "--save" not in flags:
        return
    leave_no_orphans()
    writer = importlib.import_module(f"{STRATEGIES}.filesystem_async")
    if start := _starter(writer, "get_write_results_queue"):
        _fork(start)
    if {"--async-save", "--use-persistent-ckpt-worker"} <= flags:
        caller = importlib.import_module(f"{STRATEGIES}.async_utils").PersistentAsyncCaller
        if start := _starter(caller, "_get_process"):
            caller._get_process = staticmethod(functools.partial(_fork, start))
            _fork(start, int(os.environ.get("RANK", "0")))


def _starter(holder: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that starts a process; None where this Megatron has none that can fork it."""
    start = getattr(holder, name, None)
    return start if start is not None and "mp_mode" in inspect.signature(start).parameters else None


def _fork(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``start``, and let it fork its processes, whatever the call requests."""
    call = bound(start, *args, **kwargs)
    call.arguments["mp_mode"] = "fork"
    return start(*call.args, **call.kwargs)


def copy_shared(preload: Callable[..., Any]) -> staticmethod:
    """Copy tensors for the process that writes in the background before training goes on.

    Moving a tensor from the GPU copies it. A tensor on the CPU stays where it is, in memory that the rank
    shares with the writing process and goes on updating: the checkpoint would hold a later step, or parts of
    several.  The rank waits for this.
    """

    @functools.wraps(preload)
    def preload_tensors(*args: Any, **kwargs: Any) -> list[Any]:
        return [
            (file, key, (other_data, [(item, _own(tensor)) for item, tensor in tensors]))
            for file, key, (other_data, tensors) in preload(*args, **kwargs)
        ]

    return staticmethod(preload_tensors)


def _own(tensor: Any) -> Any:
    return tensor.clone() if tensor.is_shared() else tensor
