"""Hooks into the code of packages around megatron.core, for those that are in use.

A package that was not imported is not imported here either; its place is looked for when a model is built.
Trainers need their hooks.  Transformer Engine does without: where one does not fit, its layers do as ever.
"""

from megatron_pp_ext.integration import patching
from megatron_pp_ext.integration.core import engine_linear
from megatron_pp_ext.integration.frameworks import megatron_bridge

SEAMS = patching.seams_of(megatron_bridge)
ENGINE = patching.seams_of(engine_linear)
