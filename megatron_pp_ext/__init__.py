"""Pipeline schedules for Megatron-LM: controllable memory, zero bubble and PipeDream behind one flag or call.

The names below are the public API.  They are imported when they are first used, so that importing the package
costs nothing.

For any training loop on megatron.core (docs/frameworks.md):

``install(schedule, ranks=, microbatches=)``  run the models that are built from now on by a schedule
``installed(schedule, ranks=, microbatches=)``  the same for the models that are built in a ``with`` block
``uninstall()``                           Megatron as it was
``InForce``                               what ``install`` returns: what will run

For looking at schedules and for planning; none of these needs torch or Megatron:

``build(name, ranks, microbatches)``      a schedule of ``mpp list``
``compile_schedule(ranks, microbatches, costs, memory_limit)``  the shortest schedule found within a limit
``simulate(schedule, costs)``             its ``Timeline``: start and end of every action, makespan, peaks
``draw(timelines, path)``                 a picture of one or several timelines, by title
``Costs``, ``StageCosts``                 what actions cost; ``Costs.per_rank(ranks, chunks)`` is the unit of
                                          ``mpp``
``balance(lengths, replicas, microbatches)``  documents into replicas and microbatches of equal cost
``read_csv(path)``, ``write_csv(schedule, path)``  schedules as files of torch.distributed.pipelining
``estimate(flags, model=, gpus=, system=)``  the step of a Megatron job: seconds, and the memory of every rank
``Schedule``, ``Timeline``, ``EstimatedJob``  the types that these functions take and return

In a notebook the values of these three types show themselves.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.version import VERSION

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.compile import compile_schedule
    from megatron_pp_ext.features.units.packing import balance
    from megatron_pp_ext.megatron.by_call import InForce, install, installed, uninstall
    from megatron_pp_ext.planner.estimated_job import EstimatedJob, estimate
    from megatron_pp_ext.schedule.actions import Schedule
    from megatron_pp_ext.schedule.catalog import build
    from megatron_pp_ext.schedule.costs import Costs, StageCosts
    from megatron_pp_ext.schedule.formats.csv_file import read as read_csv
    from megatron_pp_ext.schedule.formats.csv_file import write as write_csv
    from megatron_pp_ext.schedule.simulate import Timeline, simulate
    from megatron_pp_ext.view.picture import draw

__version__ = VERSION

__all__ = [
    "Costs",
    "EstimatedJob",
    "InForce",
    "Schedule",
    "StageCosts",
    "Timeline",
    "balance",
    "build",
    "compile_schedule",
    "draw",
    "estimate",
    "install",
    "installed",
    "read_csv",
    "simulate",
    "uninstall",
    "write_csv",
]

_HOMES = {
    "Costs": ("schedule.costs", "Costs"),
    "EstimatedJob": ("planner.estimated_job", "EstimatedJob"),
    "InForce": ("megatron.by_call", "InForce"),
    "Schedule": ("schedule.actions", "Schedule"),
    "StageCosts": ("schedule.costs", "StageCosts"),
    "Timeline": ("schedule.simulate", "Timeline"),
    "balance": ("features.units.packing", "balance"),
    "build": ("schedule.catalog", "build"),
    "compile_schedule": ("compiler.compile", "compile_schedule"),
    "draw": ("view.picture", "draw"),
    "estimate": ("planner.estimated_job", "estimate"),
    "install": ("megatron.by_call", "install"),
    "installed": ("megatron.by_call", "installed"),
    "read_csv": ("schedule.formats.csv_file", "read"),
    "simulate": ("schedule.simulate", "simulate"),
    "uninstall": ("megatron.by_call", "uninstall"),
    "write_csv": ("schedule.formats.csv_file", "write"),
}
"""The module and the name there of everything that is public."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    if "IPython" in sys.modules:
        import_module(f"{__name__}.view.notebook").register()
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
