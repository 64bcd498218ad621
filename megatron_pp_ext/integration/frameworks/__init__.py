"""What frameworks on megatron.core need beyond core: hooks into their own code, for those that are in use.

A framework that was not imported is not imported here either; its place is looked for when a model is built.
"""

import sys

from megatron_pp_ext.integration import patching
from megatron_pp_ext.integration.frameworks import megatron_bridge

SEAMS = patching.seams_of(megatron_bridge)


def put_in_place() -> None:
    """Replace the places of the frameworks that are imported by now; SeamError where one does not fit."""
    patching.apply(seam for seam in SEAMS if seam.places[0].module in sys.modules)
