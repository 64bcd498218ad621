"""What features add to the estimates of steps.  They register here."""

from megatron_pp_ext.features.offload.planner.estimates import Offloaded
from megatron_pp_ext.features.units.estimates import Sliced
from megatron_pp_ext.planner.step.additions import register

for one in (Offloaded(), Sliced()):
    register(one)
