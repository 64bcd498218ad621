"""Megatron's pages for the activations of experts (--moe-paged-stash), under schedules of this project.

In the first training step Megatron records the order in which each rank's layers go forward and backward;
from the second step on it brings pages back just before they are needed (transformer/moe/paged_stash.py).
Any order works, as long as all steps have the same.
"""

from typing import Any


def begin_step(config: Any, forward_only: bool) -> None:
    """Announce a step to the pages, as stock's schedules do; an evaluation runs without pages."""
    if getattr(config, "moe_paged_stash", False):
        from megatron.core.transformer.moe.paged_stash import paged_stash_reset

        paged_stash_reset(enabled=not forward_only, config=config)
