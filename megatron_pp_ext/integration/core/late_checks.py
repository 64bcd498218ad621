"""Checks of losses and gradients after the actions of a step, so that the host does not wait among them.

A check asks whether a number on the device is finite.  Stock asks at every microbatch of the loss stage and
before every bucket's reduction, and the host launches nothing until the device has come so far.  Under a V
the loss stage shares its rank with another one, whose actions would wait too.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.patching import hook

_late: list[Callable[[], None]] | None = None
"""The checks that wait for the end of the running step; None outside of one."""


@contextmanager
def put_off() -> Iterator[None]:
    """Make the checks that are asked for inside at the end of the context, in their order."""
    global _late
    late: list[Callable[[], None]] = []
    _late = late
    try:
        yield
    finally:
        _late = None
    for check in late:
        check()


@hook(
    "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
    "self result rejection_func message comparison_func tolerance fatal",
    "checks of losses and gradients for which the host does not wait between two actions",
)
def check_late(
    stock: Callable[..., None],
    machine: Any,
    result: Any,
    rejection_func: Callable[[Any], Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Put checks off within ``put_off``; in a rehearsal, whose numbers are dummies, all succeed."""
    if _late is None:
        stock(machine, result, rejection_func, *args, **kwargs)
        return
    if isinstance(result, torch.Tensor):
        # Megatron divides a loss in place afterwards, and may free it.
        result = result.detach().clone()
    if requested.require().rehearsal is not None:
        rejection_func = functools.partial(_accept, rejection_func)
    _late.append(functools.partial(stock, machine, result, rejection_func, *args, **kwargs))


def _accept(rejection_func: Callable[[Any], Any], result: Any) -> Any:
    """Return a verdict for which the host waits as for any other, and which accepts."""
    return rejection_func(result) & False
