"""The table of what cannot be asked together."""

import re
from typing import Any

from megatron_pp_ext.job.rules import (
    activations_on_host,
    measuring,
    pairs_and_vocabulary,
    schedules,
    stock,
    without_flush,
)
from megatron_pp_ext.job.rules.asked import Asked
from megatron_pp_ext.job.rules.rule import Refused
from megatron_pp_ext.job.rules.rule import refuse as refuse_by

TABLE = (
    *measuring.RULES,
    *stock.RULES,
    *schedules.RULES,
    *pairs_and_vocabulary.RULES,
    *without_flush.RULES,
    *activations_on_host.RULES,
)
"""All rules, in the order in which they are looked at."""


_FLAG = re.compile(r"--([a-z0-9-]+)")


def refuse(asked: Asked) -> None:
    """Raise ValueError, in one line, for the first rule that ``asked`` breaks."""
    refuse_by(asked, TABLE)


def refuse_to_plan(asked: Asked) -> None:
    """Raise ValueError for what the costs do not know, and for what Megatron cannot run anyhow."""
    refuse_by(asked, (*measuring.not_counted(), *stock.RULES))


def refuse_to_predict(asked: Asked) -> None:
    """Raise ValueError for what the costs of stages do not know, unless a file gives these costs."""
    refuse_by(asked, (measuring.not_compiled(),))


def refuse_without_pipeline(asked: Asked) -> None:
    """Raise ValueError for what needs a pipeline where a model has none."""
    refuse_by(asked, (schedules.NO_PIPELINE,))


def refuse_model(asked: Asked) -> None:
    """Raise ValueError for what a model that is built cannot train with, in the words of its config."""
    try:
        refuse_by(asked, (*schedules.RULES, *pairs_and_vocabulary.RULES))
    except Refused as error:
        line = _FLAG.sub(lambda found: found[1].replace("-", "_"), str(error))
        raise Refused(line.replace("pipeline_schedule ", ""), error.rule) from None


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    refuse_by(Asked(config), stock.CONFIG)


def can_share_vocabulary(asked: Asked) -> bool:
    """Whether --pipeline-vocabulary auto has a choice."""
    return not any(rule.holds(asked) for rule in pairs_and_vocabulary.VOCABULARY.rows)
