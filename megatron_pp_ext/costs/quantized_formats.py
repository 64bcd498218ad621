"""Which GPUs have products in FP8 and FP4."""

from megatron_pp_ext.costs.system import System

_CAPABILITY = {"delayed": 8.9, "tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""The compute capability of NVIDIA's GPUs from which Transformer Engine has a recipe (quantization.py)."""


def require_fp8(system: System, recipe: str) -> None:
    """Raise ValueError unless products of ``system`` run in FP8 with --fp8-recipe ``recipe``."""
    recipes = (
        [name for name in _CAPABILITY if name != "mxfp8"]
        if system.fp8_recipes is None
        else system.fp8_recipes
    )
    if recipe in recipes:
        return
    fix = f"choose {' or '.join(recipes)}" if recipes else "leave --fp8-format out"
    why = f"Transformer Engine has it from compute capability {_CAPABILITY.get(recipe, 'unknown')} on"
    if system.fp8_recipes is not None and recipe == "blockwise" and recipes:
        why = "no rate of its products is known"
    elif system.fp8_recipes is None:
        fix += f', or add "fp8_recipes" to the file, where {recipe} runs'
    raise ValueError(
        f"--fp8-recipe {recipe} is not for system {system.name}: {why}; {fix}, or another --system"
    )


def require_fp4(system: System) -> None:
    """Raise ValueError unless products of ``system`` run in NVFP4."""
    if system.matrix_rates.get("fp4"):
        return
    raise ValueError(
        f"--fp4-format is not for system {system.name}: Transformer Engine has it from compute capability "
        "10.0 on; leave --fp4-format out, or choose another --system, or add the rates of fp4 to the file"
    )
