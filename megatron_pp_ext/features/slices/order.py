"""The pass: the order of a schedule in slices of sequences."""

from dataclasses import replace

from megatron_pp_ext.compiler.make import CostsOf, Made, Make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.features.slices.shift import more, shifted
from megatron_pp_ext.schedule.names import FORWARD_ONLY


def sliced(request: Request, costs: CostsOf, before: Make) -> Made:
    """Let the units of the order be slices, where any are requested."""
    option = request.option(Slices)
    if option is None or option.count == 1:
        return before(request)
    units = option.units(request.microbatches)
    if request.schedule == FORWARD_ONLY:
        return before(replace(request, microbatches=len(units)))
    made = before(replace(request, microbatches=len(units) + more(units)))
    return replace(made, schedule=shifted(made.schedule, units))
