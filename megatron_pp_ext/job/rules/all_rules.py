"""The table of what cannot be combined, and the questions that training and commands put to it."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job.flag_table import name_of
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import schedules, stock, without_flush
from megatron_pp_ext.job.rules.rule import Rules
from megatron_pp_ext.job.rules.rule import refuse as refuse_by


@dataclass(frozen=True, slots=True)
class Topic:
    """The rules of one file, under its name.

    ``is_of_models`` is whether a model that is built, and trains without flags, is held against them too,
    and ``is_of_calls`` whether the arguments of ``install`` are, before there is a model.
    """

    name: str
    rules: tuple[Rules, ...]
    is_of_models: bool = False
    is_of_calls: bool = False


_OF_ALL_JOBS = (
    Topic("measuring", schedules.MEASURING),
    Topic("layer_seeds", schedules.LAYER_SEEDS),
    Topic("stock", stock.RULES),
    Topic("schedules", schedules.RULES, is_of_models=True),
    Topic("without_flush", without_flush.RULES),
)


def topics(job: RequestedJob | None = None) -> tuple[Topic, ...]:
    """Return the topics that are looked at for ``job``, in their order; without one, all."""
    of_features = (
        Topic(feature.name, feature.rules(), feature.refuses_models, feature.refuses_calls)
        for feature in FEATURES
        if job is None or feature.is_asked(job)
    )
    return (*_OF_ALL_JOBS, *of_features)


def rules(job: RequestedJob | None = None) -> tuple[Rules, ...]:
    """Return the rules that are looked at for ``job``, in their order; without one, all."""
    return tuple(rules for topic in topics(job) for rules in topic.rules)


def refuse(job: RequestedJob) -> None:
    """Raise ValueError, in one line, for the first rule that ``job`` breaks."""
    refuse_by(job, rules(job))


def turned_off(job: RequestedJob) -> dict[str, str]:
    """Return the arguments of ``job`` that its schedule turns off, each with a line that reports it."""
    rules = schedules.TURNED_OFF
    return {name_of(rule.flag): rules.sentence(rule, job) for rule in rules.broken(job)}


def refuse_to_plan(job: RequestedJob) -> None:
    """Raise ValueError for what the costs do not know, and for what Megatron starts and cannot train."""
    from megatron_pp_ext.job import flag_effects

    refuse_by(job, (*flag_effects.lacks_costs(), *stock.PLANNED, *stock.RULES))


def refuse_to_predict(job: RequestedJob) -> None:
    """Raise ValueError for what the costs of stages do not know, unless a file gives these costs."""
    from megatron_pp_ext.job import flag_effects

    refuse_by(job, (flag_effects.not_compiled(),))


def refuse_without_pipeline(job: RequestedJob) -> None:
    """Raise ValueError for what needs a pipeline where a model has none."""
    refuse_by(job, (schedules.WITHOUT_PIPELINE,))


def refuse_model(job: RequestedJob) -> None:
    """Raise ValueError for what a model that is built cannot train with."""
    refuse_by(job, [rules for topic in topics(job) if topic.is_of_models for rules in topic.rules])


def refuse_call(schedule: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for ``arguments`` of a call that cannot be combined."""
    flags = {f"pipeline_{name}": value for name, value in arguments.items()}
    job = RequestedJob.of_args(Namespace(pipeline_schedule=schedule, **flags))
    refuse_by(job, [rules for topic in topics(job) if topic.is_of_calls for rules in topic.rules])


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    refuse_by(RequestedJob.of_args(config), schedules.CONFIG)


def has_choice(job: RequestedJob, flag: str) -> bool:
    """Whether ``auto`` as the value of ``flag`` has a choice: no rule is broken that takes it away."""
    about = (group for group in rules(job) if group.auto_of == flag)
    return not any(rule.holds(job) for group in about for rule in group.rows)
