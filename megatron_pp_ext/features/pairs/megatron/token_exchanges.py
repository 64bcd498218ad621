"""Exchanges of tokens with the experts of other ranks, in traces of steps that run by Megatron's plans."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megatron_pp_ext.integration.core import action_recording
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.releases import CORE_0_17
from megatron_pp_ext.schedule.spans import Label

_NAMES = ("moe_dispatch", "moe_combine")
"""The names of a plan's exchanges, which the direction follows."""


@hook(
    "megatron.core.pipeline_parallel.utils:ScheduleNode.stream_acquire_context",
    "self name",
    "--pipeline-trace of exchanges of tokens",
    since=CORE_0_17,
)
@contextmanager
def record_exchange(stock: Callable[..., Any], self: Any, name: str | None = None) -> Iterator[None]:
    """Report the exchanges of tokens in Megatron's plans of layers, each in its own stream."""
    recorder = action_recording.recorder()
    recorded: AbstractContextManager[None] = nullcontext()
    if recorder is not None and name is not None and name.startswith(_NAMES):
        recorded = recorder.span(Label("exchange", name))
    with stock(self, name), recorded:
        yield
