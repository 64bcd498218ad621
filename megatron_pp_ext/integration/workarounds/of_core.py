"""The workarounds of megatron.core, which any trainer on it needs; they want nothing of megatron.training."""

from megatron_pp_ext.integration.patching import hooks_of
from megatron_pp_ext.integration.workarounds import bucket_padding, gathering_ahead

MODULES = (gathering_ahead, bucket_padding)

HOOKS = hooks_of(*MODULES)
