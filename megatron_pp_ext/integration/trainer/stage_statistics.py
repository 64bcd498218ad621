"""Statistics of an update by which Megatron's loop would make the stages wait for each other."""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.integration.core.stage_optimizer import updates_by_stage
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_19


@hook(
    "megatron.training.utils:logical_and_across_model_parallel_group",
    {CORE_0_17: "input", CORE_0_19: "input group"},
    "updates of a pipeline that never flushes",
)
@hook(
    "megatron.training.utils:reduce_max_stat_across_model_parallel_group",
    {CORE_0_17: "stat", CORE_0_19: "stat group"},
    "logs of a pipeline that never flushes",
)
def keep_within_stage(stock: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return this rank's own value, which is that of all ranks of its stage."""
    return value if updates_by_stage() else stock(value, *args, **kwargs)
