"""Hooks into packages around megatron.core, for the packages that are in use.

A package that was not imported is not imported here either; its place is looked for when a model is built.
Trainers need their hooks.  Where one of Transformer Engine or of a trainer's log does not fit, its layers do
as ever, and the log has no numbers of the pipeline.
"""

from megatron_pp_ext.megatron import patching
from megatron_pp_ext.megatron.core import engine_linear
from megatron_pp_ext.megatron.frameworks import megatron_bridge, trainer_logs

HOOKS = patching.hooks_of(megatron_bridge)
ENGINE = patching.hooks_of(engine_linear)
LOGS = patching.hooks_of(trainer_logs)
