"""Every workaround; ``mpp doctor`` lists them with their releases and tests."""

from megatron_pp_ext.integration.patching import hooks_of
from megatron_pp_ext.integration.workarounds import (
    damaged_checkpoint,
    dataset_helpers,
    growing_batches,
    needed_flags,
    of_core,
    skipped_steps,
    stage_data,
)

MODULES = (
    stage_data,
    skipped_steps,
    growing_batches,
    *of_core.MODULES,
    damaged_checkpoint,
    dataset_helpers,
    needed_flags,
)

WORKAROUNDS = tuple(module.WORKAROUND for module in MODULES)

HOOKS = hooks_of(*MODULES)
