"""Every place where this package enters Megatron-LM.

``core_hooks`` and ``trainer_hooks`` bring schedules into Megatron's two halves, ``workarounds.table`` has the
workarounds of Megatron's own defects, and ``cpu_hooks`` the hooks for a machine without a GPU.
``patching`` checks and replaces them, ``mpp doctor`` lists them.  This imports Megatron.
"""

from megatron_pp_ext.integration import cpu_hooks
from megatron_pp_ext.integration.core_hooks import CORE
from megatron_pp_ext.integration.patching import Hook
from megatron_pp_ext.integration.trainer_hooks import TRAINER
from megatron_pp_ext.integration.workarounds import table


def all_hooks(cpu: bool = False) -> tuple[Hook, ...]:
    """Return the hooks of the launcher, with ``cpu`` on a machine without a GPU."""
    return (*launch_hooks(cpu), *schedule_hooks())


def launch_hooks(cpu: bool) -> tuple[Hook, ...]:
    """Return the hooks without which a training script would not run on some machines, under any schedule."""
    return (*table.HOOKS, *cpu_hooks.CPU) if cpu else table.HOOKS


def schedule_hooks() -> tuple[Hook, ...]:
    """Return the hooks that bring schedules into a training run."""
    return (*CORE, *TRAINER)
