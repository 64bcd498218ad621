"""Where the host of a rank would wait for its device within a training step.

On a GPU each of the calls that are counted here waits until the device has done all that was launched before.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.integration.runners import pipeline_runner
from megatron_pp_ext.runtime import executor
from tests.support import training

WAITING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu", "numpy")
CHECK = "rerun_state_machine.validate_result"


@dataclass
class HostWaits:
    """The waits of one step's pipeline by the function that waits: among our actions, and all others."""

    among: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def next_step(self, _: list[torch.nn.Module]) -> None:
        """Count from the second step's end on: until then ranks still agree on what they run."""
        self.steps += 1
        if self.steps == 2:
            for name in WAITING:
                setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
            torch.cuda.synchronize = self._counted(torch.cuda.synchronize)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            frames = [frame.f_code for frame in _frames(sys._getframe(1))]
            files = {code.co_filename for code in frames}
            stock = any(code.co_name.startswith("forward_backward_pipelining") for code in frames)
            if stock or pipeline_runner.__file__ in files:
                place = next(code for code in frames if "/torch/" not in code.co_filename)
                found = self.among if executor.__file__ in files else self.beside
                found[f"{Path(place.co_filename).stem}.{place.co_name}"] += 1
            return function(*args, **kwargs)

        return counting


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def host_waits(rank: int, flags: Sequence[str]) -> HostWaits:
    """Train the tiny GPT as ``rank`` and return the waits of the third step."""
    waits = HostWaits()
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *flags])
    hooks = (training.initialize_by_layer, lambda _: None, waits.next_step)
    training._train(rank, argv, *hooks)
    return HostWaits(waits.among, waits.beside)
