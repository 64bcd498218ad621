"""Hooks into packages around megatron.core, for the packages that are in use.

A package that was not imported is not imported here either; its place is looked for when a model is built.
Trainers need their hooks.  Transformer Engine does without: where one does not fit, its layers do as ever.
"""

import sys

from megatron_pp_ext.integration import patching
from megatron_pp_ext.integration.core import engine_linear
from megatron_pp_ext.integration.frameworks import megatron_bridge

SEAMS = patching.seams_of(megatron_bridge)
ENGINE = patching.seams_of(engine_linear)


def put_in_place() -> None:
    """Replace the places of packages that are imported by now; SeamError where a trainer does not fit."""
    fitting = [*SEAMS, *filter(_fits, filter(_is_imported, ENGINE))]
    patching.apply(filter(_is_imported, fitting))


def _is_imported(seam: patching.Seam) -> bool:
    return seam.places[0].module in sys.modules


def _fits(seam: patching.Seam) -> bool:
    try:
        return seam.here() is not None
    except patching.SeamError:
        return False
