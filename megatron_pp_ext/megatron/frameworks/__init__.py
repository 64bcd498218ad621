"""Hooks into packages around megatron.core, for the packages that are in use.

A package that was not imported is not imported here either; its place is looked for when a model is built.
Trainers need their hooks.  Transformer Engine does without: where one does not fit, its layers do as ever.
"""

from megatron_pp_ext.megatron import patching
from megatron_pp_ext.megatron.core import engine_linear
from megatron_pp_ext.megatron.frameworks import megatron_bridge

HOOKS = patching.hooks_of(megatron_bridge)
ENGINE = patching.hooks_of(engine_linear)
