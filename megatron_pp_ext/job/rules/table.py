"""The table of what cannot be combined: the rules that concern all jobs, and then those of features."""

from dataclasses import dataclass

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job.rules import layer_seeds, measuring, schedules, stock, without_flush
from megatron_pp_ext.job.rules.rule import Rules


@dataclass(frozen=True, slots=True)
class Topic:
    """The rules of one file, under its name.

    ``is_of_models`` says whether a model that is built, and trains without flags, is held against them too,
    and ``is_of_calls`` whether the arguments of ``install`` are, before there is a model.
    """

    name: str
    rules: tuple[Rules, ...]
    is_of_models: bool = False
    is_of_calls: bool = False


_OF_ALL_JOBS = (
    Topic("measuring", measuring.RULES),
    Topic("layer_seeds", layer_seeds.RULES),
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
