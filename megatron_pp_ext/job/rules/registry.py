"""The topics of rules, and where features register theirs.  ``job.rules.table`` reads all of them."""

from dataclasses import dataclass

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


TOPICS = [
    Topic("measuring", measuring.RULES),
    Topic("layer_seeds", layer_seeds.RULES),
    Topic("stock", stock.RULES),
    Topic("schedules", schedules.RULES, is_of_models=True),
    Topic("without_flush", without_flush.RULES),
]
"""The topics that concern all jobs; features add theirs."""


def register(topic: Topic, after: str) -> None:
    """Add ``topic``, to be looked at right after the topic named ``after``.

    ValueError where its name is taken, or where there is no topic to follow.
    """
    names = [one.name for one in TOPICS]
    if topic.name in names or after not in names:
        raise ValueError(f"rules about {topic.name!r} after {after!r}: the topics are {', '.join(names)}")
    TOPICS.insert(names.index(after) + 1, topic)
