"""The questions to the table of what cannot be combined."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import config as of_config
from megatron_pp_ext.job.rules import planned, schedules, stock, table, unknown_costs
from megatron_pp_ext.job.rules.rule import refuse as refuse_by


def refuse(job: RequestedJob) -> None:
    """Raise ValueError, in one line, for the first rule that ``job`` breaks."""
    refuse_by(job, table.rules())


def refuse_to_plan(job: RequestedJob) -> None:
    """Raise ValueError for what the costs do not know, and for what Megatron starts and cannot train."""
    refuse_by(job, (*unknown_costs.not_counted(), *planned.RULES, *stock.RULES))


def refuse_to_predict(job: RequestedJob) -> None:
    """Raise ValueError for what the costs of stages do not know, unless a file gives these costs."""
    refuse_by(job, (unknown_costs.not_compiled(),))


def refuse_without_pipeline(job: RequestedJob) -> None:
    """Raise ValueError for what needs a pipeline where a model has none."""
    refuse_by(job, (schedules.WITHOUT_PIPELINE,))


def refuse_model(job: RequestedJob) -> None:
    """Raise ValueError for what a model that is built cannot train with."""
    refuse_by(job, [rules for topic in table.topics() if topic.is_of_models for rules in topic.rules])


def refuse_call(schedule: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for ``arguments`` of a call that cannot be combined."""
    about_calls = [rules for topic in table.topics() if topic.is_of_calls for rules in topic.rules]
    flags = {f"pipeline_{name}": value for name, value in arguments.items()}
    refuse_by(RequestedJob.of_args(Namespace(pipeline_schedule=schedule, **flags)), about_calls)


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    refuse_by(RequestedJob.of_args(config), of_config.RULES)


def has_choice(job: RequestedJob, flag: str) -> bool:
    """Whether ``auto`` as the value of ``flag`` has a choice: no rule is broken that takes it away."""
    about = (rules for rules in table.rules() if rules.auto_of == flag)
    return not any(rule.holds(job) for rules in about for rule in rules.rows)
