"""Every place where this package enters Megatron-LM.

``core_seams`` and ``trainer_seams`` bring schedules into Megatron's two halves, ``mends.table`` has the mends
of Megatron's own defects, and ``cpu_seams`` what only a machine without a GPU needs.  ``patching`` checks and
replaces them, ``mpp doctor`` lists them.  This imports Megatron.
"""

from megatron_pp_ext.integration import cpu_seams
from megatron_pp_ext.integration.core_seams import CORE
from megatron_pp_ext.integration.mends import table
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.trainer_seams import TRAINER


def all_seams(cpu: bool = False) -> tuple[Seam, ...]:
    """Return what the launcher replaces, with ``cpu`` on a machine without a GPU."""
    return (*launch_seams(cpu), *schedule_seams())


def launch_seams(cpu: bool) -> tuple[Seam, ...]:
    """Return what lets a training script run where it otherwise would not, under any schedule."""
    return (*table.SEAMS, *cpu_seams.CPU) if cpu else table.SEAMS


def schedule_seams() -> tuple[Seam, ...]:
    """Return what brings schedules into a training run."""
    return (*CORE, *TRAINER)
