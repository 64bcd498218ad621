"""Megatron's pages for what experts keep (--moe-paged-stash), under schedules of this project.

Megatron records in the first training step in which order each rank's layers go forward and backward, and
from the second on brings pages back just before they are needed (transformer/moe/paged_stash.py).  It asks
nothing of that order, except that all steps have the same.
"""

from typing import Any


def begin_step(config: Any, forward_only: bool) -> None:
    """Tell the pages that a step begins, as stock's schedules do; an evaluation goes by without them."""
    if getattr(config, "moe_paged_stash", False):
        from megatron.core.transformer.moe.paged_stash import paged_stash_reset

        paged_stash_reset(enabled=not forward_only, config=config)
