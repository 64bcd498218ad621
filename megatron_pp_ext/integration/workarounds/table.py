"""Every workaround; ``mpp doctor`` lists them with their releases and tests."""

from megatron_pp_ext.integration.patching import hooks_of
from megatron_pp_ext.integration.workarounds import (
    bucket_padding,
    dataset_helpers,
    skipped_steps,
    stage_data,
)

MODULES = (stage_data, skipped_steps, bucket_padding, dataset_helpers)

WORKAROUNDS = tuple(module.WORKAROUND for module in MODULES)

HOOKS = hooks_of(*MODULES)
