"""What each of Megatron's arguments does to a step's time and memory, and rules about what the costs lack."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.formats import costs_file

_NOT_COSTS = "what a model is apart from its costs", "how tokens are routed: each expert gets as many"
"""The arguments without effect that a description of a model may have."""


def table() -> Mapping[str, Any]:
    """Return the sections of ``flag_effects.toml``: names, with spaces between, by effect.

    But ``values`` has, by argument, the values that the costs of "stages" or of a "step" know, where not all.

    ``flag_effects.toml`` has those of all releases: those that the costs of a step count, those that change a
    step somewhat and are reported with an estimate (``bounds``), those with which it would be of something
    else and is refused, and those without effect.  An argument that has its default value is not asked.
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


def is_asked(job: RequestedJob, name: str) -> bool:
    """Whether ``job`` has another value of the argument ``name`` than Megatron gives it."""
    default = _defaults().get(name)
    value = getattr(job.args, name, default)
    return bool(value != default)


def not_counted(job: RequestedJob) -> list[str]:
    """Return the flags in ``job`` that an estimate leaves out, each with its effect on a real step.

    Such as ``--qk-layernorm (longer: kernels are added, or no longer fused or hidden)``.
    """
    lines = []
    for how, names in table()["bounds"].items():
        flags = [flag(name) for name in names.split() if is_asked(job, name)]
        if flags:
            lines.append(f"{', '.join(flags)} ({how})")
    return lines


def caution(lines: Sequence[str]) -> list[str]:
    """Return a sentence about an estimate that is made without the flags in ``lines``; none without any."""
    return [f"a step may be other than estimated, which is made without {'; '.join(lines)}"] if lines else []


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


_LEAVE_OUT = "leave it out of the estimate"

_MEASURE = "measure the stages with mpp rehearse --costs FILE and give --pipeline-costs FILE"

_ADD_PARAMETERS = (
    'add "parameters" to every one of the "stages" in {pipeline_costs}, as mpp rehearse --costs does'
)


def _rules(what: str, fix: str) -> Iterator[Rule]:
    """Yield a rule for each argument, and for values of others, that the costs of ``what`` do not know."""
    for name, reason in refused(what).items():
        value = "" if "sets" in setting()[name] else f" {{{name}}}"
        changed = partial(is_asked, name=name)
        yield Rule(f"{flag(name)}{value}", reason, fix, when=changed)
    for name, values in table()["values"][what].items():
        reason = f"only {', '.join(values[:-1])} and {values[-1]} are modelled"
        other = partial(_has_other, name=name, values=values)
        yield Rule(f"{flag(name)} {{{name}}}", reason, fix, when=other)


def _has_other(job: RequestedJob, name: str, values: Sequence[str]) -> bool:
    return job.argument(name) is not None and str(job.argument(name)) not in values


@cache
def lacks_costs() -> tuple[Rules, ...]:
    """Return the rules about what an estimate would be wrong for.

    They read two tables, which commands that estimate nothing need not wait for.
    """
    unless_measured = Rules(
        title="In `mpp estimate` and `mpp search`, unless the stages are measured",
        when=_predicts,
        subject="the planner",
        rows=tuple(_rules("stages", f"{_LEAVE_OUT}, or {_MEASURE}")),
    )
    measured = Rules(
        title="", when=_lacks_parameters, subject="the planner", rows=tuple(_rules("stages", _ADD_PARAMETERS))
    )
    always = Rules(
        title="In `mpp estimate` and `mpp search`",
        subject="the planner",
        rows=tuple(_rules("step", _LEAVE_OUT)),
    )
    return unless_measured, measured, always


@cache
def not_compiled() -> Rules:
    """Return the rules about what training's own costs of stages would be wrong for."""
    return Rules(
        title="Where training predicts its stages: `flex`, `auto`, and `auto` for a layout or the vocabulary",
        when=_predicts,
        subject="a prediction from the model's sizes",
        rows=tuple(_rules("stages", f"{_MEASURE}, or leave flex and every auto out")),
    )


def _predicts(job: RequestedJob) -> bool:
    """Whether no file has the costs of stages."""
    return job.pipeline.pipeline_costs is None


def _lacks_parameters(job: RequestedJob) -> bool:
    """Whether the file of --pipeline-costs is without the parameters of some stage."""
    file = job.pipeline.pipeline_costs
    return file is not None and not costs_file.read(file).has_parameters
