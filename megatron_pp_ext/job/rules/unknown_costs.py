"""What the costs of a step do not know, as rules made of ``flag_effects.toml``."""

from collections.abc import Iterator, Sequence
from functools import cache, partial

from megatron_pp_ext.job import flag_effects
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.formats import costs_file

_LEAVE_OUT = "leave it out of the estimate"

_MEASURE = "measure the stages with mpp rehearse --costs FILE and give --pipeline-costs FILE"

_ADD_PARAMETERS = (
    'add "parameters" to every one of the "stages" in {pipeline_costs}, as mpp rehearse --costs does'
)


def _rules(what: str, fix: str) -> Iterator[Rule]:
    """Yield a rule for each argument, and for values of others, that the costs of ``what`` do not know."""
    for name, reason in flag_effects.refused(what).items():
        value = "" if "sets" in flag_effects.setting()[name] else f" {{{name}}}"
        changed = partial(flag_effects.is_asked, name=name)
        yield Rule(f"{flag_effects.flag(name)}{value}", reason, fix, when=changed)
    for name, values in flag_effects.table()["values"][what].items():
        reason = f"only {', '.join(values[:-1])} and {values[-1]} are modelled"
        other = partial(_has_other, name=name, values=values)
        yield Rule(f"{flag_effects.flag(name)} {{{name}}}", reason, fix, when=other)


def _has_other(job: RequestedJob, name: str, values: Sequence[str]) -> bool:
    return job.argument(name) is not None and str(job.argument(name)) not in values


@cache
def not_counted() -> tuple[Rules, ...]:
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
        title="",
        when=_lacks_parameters,
        subject="the planner",
        rows=tuple(_rules("stages", _ADD_PARAMETERS)),
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
