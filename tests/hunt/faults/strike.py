"""A rank that hits itself in the middle of a moment.

Calls of functions, in Python or C, are counted: those in all train steps of the run, in all its copies of
activations (which do not count in their steps), in all its saves, or in all its evaluations. That takes no
clock: a case hits the same place again, whatever the machine does.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.training import get_args, training

from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.files import write_whole

FUNCTIONS = {
    "step": (training, "train_step"),
    "copy": (OffloadedActivations, "offload", "reload"),
    "save": (training, "save_checkpoint", "maybe_finalize_async_save"),
    "evaluation": (training, "evaluate"),
}
"""Where the functions of each moment are, and their names."""


@dataclass(frozen=True)
class Strike:
    """The ``call``-th call of ``moment`` raises ``signal``; ``file`` then says when and where that was."""

    moment: str
    call: int
    signal: signal.Signals
    file: Path


def count_calls(strike: Strike | None) -> dict[str, int]:
    """Count the calls of each moment from now on, in the dictionary that is returned, and strike there."""
    calls = dict.fromkeys(FUNCTIONS, 0)
    rank = os.getpid()

    def counted(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(frame: FrameType, event: str, argument: Any) -> None:
            if os.getpid() != rank:
                sys.setprofile(None)  # a process that writes checkpoints
            elif event in ("call", "c_call"):
                calls[moment] += 1
                if strike and (moment, calls[moment]) == (strike.moment, strike.call):
                    called = argument.__name__ if event == "c_call" else ""
                    _hit(strike, [entry.name for entry in traceback.extract_stack(frame)], called)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(count)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return call

    for moment, (place, *names) in FUNCTIONS.items():
        for name in names:
            setattr(place, name, counted(moment, getattr(place, name)))
    return calls


def _hit(strike: Strike, stack: list[str], called: str) -> None:
    sys.setprofile(None)
    inner = " > ".join([*stack[-3:], *filter(None, [called])])
    where = f"step {get_args().curr_iteration + 1}, {inner}"
    write_whole(strike.file, f"{time.time()}\n{os.getpid()}\n{where}\n")
    os.kill(os.getpid(), strike.signal)
