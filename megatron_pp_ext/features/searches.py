"""What features offer to searches of configurations.  They register here, in the order of the trials."""

from megatron_pp_ext.features.offload.planner.variants import OnHost
from megatron_pp_ext.planner.search.variants import register

register(OnHost())
