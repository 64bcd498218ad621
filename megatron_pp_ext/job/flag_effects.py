"""The effect of each of Megatron's arguments on the time and the memory of a training step.

``flag_effects.toml`` has those of all releases: those that the costs of a step count, those that change a
step somewhat and are reported with an estimate (``bounds``), those with which it would be of something else
and is refused, and those without effect.  An argument that has its default value is not asked.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.requested_job import RequestedJob

_NOT_COSTS = "what a model is apart from its costs", "how tokens are routed: each expert gets as many"
"""The arguments without effect that a description of a model may have."""


def table() -> Mapping[str, Any]:
    """Return the sections of ``flag_effects.toml``: names, with spaces between, by effect.

    But ``values`` has, by argument, the values that the costs of "stages" or of a "step" know, where not all.
    """
    return flag_table.effects()


def counted() -> set[str]:
    """Return the names of the arguments that the costs of a step count."""
    return set(_by_name(table()["counted"]))


def described() -> set[str]:
    """Return the names of the arguments that a description of a model and its training may have."""
    groups = table()["bounds"], table()["refused"]["stages"], table()["refused"]["step"]
    apart = [table()["without_effect"][group].split() for group in _NOT_COSTS]
    return counted().union(*apart, *map(_by_name, groups))


def refused(estimate: str) -> dict[str, str]:
    """Return the arguments that an ``estimate`` of "stages" or "step" knows nothing of, and why."""
    return _by_name(table()["refused"][estimate])


def is_asked(asked: RequestedJob, name: str) -> bool:
    """Whether ``asked`` has another value of the argument ``name`` than Megatron gives it."""
    default = _defaults().get(name)
    value = getattr(asked.args, name, default)
    return bool(value != default)


def not_counted(asked: RequestedJob) -> list[str]:
    """Return the flags in ``asked`` that an estimate leaves out, each with its effect on a real step.

    Such as ``--qk-layernorm (longer: kernels are added, or no longer fused or hidden)``.
    """
    lines = []
    for how, names in table()["bounds"].items():
        flags = [flag(name) for name in names.split() if is_asked(asked, name)]
        if flags:
            lines.append(f"{', '.join(flags)} ({how})")
    return lines


def flag(name: str) -> str:
    """Return the flag that gives the argument ``name`` another value than its default."""
    flags: list[str] = setting()[name]["flags"]
    return flags[0]


@cache
def setting() -> dict[str, flag_table.Row]:
    """Return by argument the row that sets another value than the default."""
    return {row["dest"]: row for row in flag_table.rows() if row.get("sets", ...) != row["default"]}


@cache
def _defaults() -> dict[str, Any]:
    return {row["dest"]: row["default"] for row in flag_table.rows()}


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in groups.items() for name in names.split()}
