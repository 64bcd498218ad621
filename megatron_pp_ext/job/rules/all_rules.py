"""The table of what cannot be combined, and the questions that training and commands put to it."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job import flag_effects
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


def topics() -> tuple[Topic, ...]:
    """Return all topics, in the order in which they are looked at."""
    of_features = (
        Topic(feature.name, feature.rules(), feature.refuses_models, feature.refuses_calls)
        for feature in FEATURES
    )
    return (*_OF_ALL_JOBS, *of_features)


def rules() -> tuple[Rules, ...]:
    """Return all rules, in the order in which they are looked at."""
    return tuple(rules for topic in topics() for rules in topic.rules)


def refuse(job: RequestedJob) -> None:
    """Raise ValueError, in one line, for the first rule that ``job`` breaks."""
    refuse_by(job, rules())


def refuse_to_plan(job: RequestedJob) -> None:
    """Raise ValueError for what the costs do not know, and for what Megatron starts and cannot train."""
    refuse_by(job, (*flag_effects.lacks_costs(), *stock.PLANNED, *stock.RULES))


def refuse_to_predict(job: RequestedJob) -> None:
    """Raise ValueError for what the costs of stages do not know, unless a file gives these costs."""
    refuse_by(job, (flag_effects.not_compiled(),))


def refuse_without_pipeline(job: RequestedJob) -> None:
    """Raise ValueError for what needs a pipeline where a model has none."""
    refuse_by(job, (schedules.WITHOUT_PIPELINE,))


def refuse_model(job: RequestedJob) -> None:
    """Raise ValueError for what a model that is built cannot train with."""
    refuse_by(job, [rules for topic in topics() if topic.is_of_models for rules in topic.rules])


def refuse_call(schedule: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for ``arguments`` of a call that cannot be combined."""
    about_calls = [rules for topic in topics() if topic.is_of_calls for rules in topic.rules]
    flags = {f"pipeline_{name}": value for name, value in arguments.items()}
    refuse_by(RequestedJob.of_args(Namespace(pipeline_schedule=schedule, **flags)), about_calls)


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    refuse_by(RequestedJob.of_args(config), schedules.CONFIG)


def has_choice(job: RequestedJob, flag: str) -> bool:
    """Whether ``auto`` as the value of ``flag`` has a choice: no rule is broken that takes it away."""
    about = (rules for rules in rules() if rules.auto_of == flag)
    return not any(rule.holds(job) for rules in about for rule in rules.rows)
