"""The mends of megatron.core, which any trainer on it needs; they want nothing of megatron.training."""

from megatron_pp_ext.integration.mends import bucket_padding, gathering_ahead
from megatron_pp_ext.integration.patching import seams_of

MODULES = (gathering_ahead, bucket_padding)

SEAMS = seams_of(*MODULES)
