"""What the costs of a step do not know, as rules made of ``flag_effects.toml``."""

from collections.abc import Iterator
from functools import cache

from megatron_pp_ext.job import flag_effects
from megatron_pp_ext.job.rules.rule import Rule, Rules

_LEAVE_OUT = "leave it out of the estimate"

_MEASURE = "measure the stages with mpp rehearse --costs FILE and give --pipeline-costs FILE"

_ADD_PARAMETERS = (
    'add "parameters" to every one of the "stages" in {pipeline_costs}, as mpp rehearse --costs does'
)


def _rules(what: str, fix: str) -> Iterator[Rule]:
    """Yield a rule for each argument, and for values of others, that the costs of ``what`` do not know."""
    for name, reason in flag_effects.refused(what).items():
        value = "" if "sets" in flag_effects.setting()[name] else f" {{{name}}}"
        yield Rule(f"{flag_effects.flag(name)}{value}", reason, fix, f"{name} changed")
    for name, values in flag_effects.table()["values"][what].items():
        reason = f"only {', '.join(values[:-1])} and {values[-1]} are modelled"
        other = f"{name} given, not {name} is {' or '.join(values)}"
        yield Rule(f"{flag_effects.flag(name)} {{{name}}}", reason, fix, other)


@cache
def not_counted() -> tuple[Rules, ...]:
    """Return the rules about what an estimate would be wrong for.

    They read two tables, which commands that estimate nothing need not wait for.
    """
    unless_measured = Rules(
        "In `mpp estimate` and `mpp search`, unless the stages are measured",
        "not pipeline_costs given",
        tuple(_rules("stages", f"{_LEAVE_OUT}, or {_MEASURE}")),
        "the planner",
    )
    measured = Rules("", "lacks_parameters", tuple(_rules("stages", _ADD_PARAMETERS)), "the planner")
    always = Rules("In `mpp estimate` and `mpp search`", "", tuple(_rules("step", _LEAVE_OUT)), "the planner")
    return unless_measured, measured, always


@cache
def not_compiled() -> Rules:
    """Return the rules about what training's own costs of stages would be wrong for."""
    return Rules(
        "Where training predicts its stages: `flex`, `auto`, and `auto` for a layout or the vocabulary",
        "not pipeline_costs given",
        tuple(_rules("stages", f"{_MEASURE}, or leave flex and every auto out")),
        "a prediction from the model's sizes",
    )
