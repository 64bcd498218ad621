"""The table of what cannot be asked together."""

import re
from typing import Any

from megatron_pp_ext.job.call_words import by_call
from megatron_pp_ext.job.rules import unknown_costs
from megatron_pp_ext.job.rules.asked import Asked
from megatron_pp_ext.job.rules.rule import Refused, read
from megatron_pp_ext.job.rules.rule import refuse as refuse_by

_FILES = "measuring", "stock", "schedules", "pairs_and_vocabulary", "without_flush", "activations_on_host"

TOPICS = {file: read(file) for file in _FILES}
"""The rules by the files that they are in."""

TABLE = tuple(rules for topic in TOPICS.values() for rules in topic)
"""All rules, in the order in which they are looked at."""

CONFIG = read("config")
"""The rules about settings without a flag."""

START = read("start")
"""The rules about what Megatron itself refuses when it starts, for what is planned."""

_BY_TITLE = {rules.title: rules for rules in TABLE}

_FLAG = re.compile(r"--([a-z0-9-]+)")


def refuse(asked: Asked) -> None:
    """Raise ValueError, in one line, for the first rule that ``asked`` breaks."""
    refuse_by(asked, TABLE)


def refuse_to_plan(asked: Asked) -> None:
    """Raise ValueError for what the costs do not know, and for what Megatron cannot run anyhow."""
    refuse_by(asked, (*unknown_costs.not_counted(), *START, *TOPICS["stock"]))


def refuse_to_predict(asked: Asked) -> None:
    """Raise ValueError for what the costs of stages do not know, unless a file gives these costs."""
    refuse_by(asked, (unknown_costs.not_compiled(),))


def refuse_without_pipeline(asked: Asked) -> None:
    """Raise ValueError for what needs a pipeline where a model has none."""
    refuse_by(asked, (_BY_TITLE["Without a pipeline"],))


def refuse_model(asked: Asked) -> None:
    """Raise ValueError for what a model that is built cannot train with, in the words of its config."""
    try:
        refuse_by(asked, (*TOPICS["schedules"], *TOPICS["pairs_and_vocabulary"]))
    except Refused as error:
        line = _FLAG.sub(lambda found: found[1].replace("-", "_"), by_call(str(error)))
        raise Refused(line.replace("pipeline_schedule ", ""), error.rule) from None


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    refuse_by(Asked(config), CONFIG)


def can_share_vocabulary(asked: Asked) -> bool:
    """Whether --pipeline-vocabulary auto has a choice."""
    title = "Beside a shared vocabulary; `auto` does not share it then"
    return not any(rule.holds(asked) for rule in _BY_TITLE[title].rows)
