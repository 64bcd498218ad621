"""Statistics of an update by which Megatron's loop would make the stages wait for each other."""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration.core.stage_optimizer import updates_by_stage
from megatron_pp_ext.integration.patching import hook


@hook(
    "megatron.training.utils:logical_and_across_model_parallel_group",
    ("input", "input group"),
    "updates of a pipeline that never flushes",
)
@hook(
    "megatron.training.utils:reduce_max_stat_across_model_parallel_group",
    ("stat", "stat group"),
    "logs of a pipeline that never flushes",
)
def keep_within_stage(stock: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return this rank's own value, which is that of all ranks of its stage."""
    return value if updates_by_stage() else stock(value, *args, **kwargs)
