"""Hooks into packages around megatron.core, for the packages that are in use.

A package that was not imported is not imported here either; its place is looked for when a model is built.
Trainers need their hooks.  Transformer Engine does without: where one does not fit, its layers do as ever.
"""

import sys

from megatron_pp_ext.integration import patching
from megatron_pp_ext.integration.core import engine_linear
from megatron_pp_ext.integration.frameworks import megatron_bridge

HOOKS = patching.hooks_of(megatron_bridge)
ENGINE = patching.hooks_of(engine_linear)


def put_in_place() -> None:
    """Replace the places of packages that are imported by now; HookError where a trainer does not fit."""
    fitting = [*HOOKS, *filter(_fits, filter(_is_imported, ENGINE))]
    patching.apply(filter(_is_imported, fitting))


def _is_imported(hook: patching.Hook) -> bool:
    return hook.places[0].module in sys.modules


def _fits(hook: patching.Hook) -> bool:
    try:
        return hook.here() is not None
    except patching.HookError:
        return False
