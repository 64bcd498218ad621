"""The table of what cannot be combined, by topics, and where features register theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp_ext.job.rules import layer_seeds, measuring, schedules, stock, without_flush
from megatron_pp_ext.job.rules.rule import Rules


@dataclass(frozen=True, slots=True)
class Topic:
    """Rules of one file, under its name.

    ``is_of_models`` says whether a model that is built, and trains without flags, is held against them too.
    """

    name: str
    rules: tuple[Rules, ...]
    is_of_models: bool = False


_TOPICS = [
    Topic("measuring", measuring.RULES),
    Topic("layer_seeds", layer_seeds.RULES),
    Topic("stock", stock.RULES),
    Topic("schedules", schedules.RULES, is_of_models=True),
    Topic("without_flush", without_flush.RULES),
]
"""All topics, in the order in which they are looked at."""


def register(topic: Topic, after: str) -> None:
    """Add ``topic`` to the table, to be looked at right after the topic named ``after``.

    ValueError where its name is taken, or where there is no topic to follow.
    """
    names = [one.name for one in _TOPICS]
    if topic.name in names or after not in names:
        raise ValueError(f"rules about {topic.name!r} after {after!r}: the table has {', '.join(names)}")
    _TOPICS.insert(names.index(after) + 1, topic)


def topics() -> Sequence[Topic]:
    """Return all topics, in the order in which they are looked at."""
    return tuple(_TOPICS)


def rules() -> tuple[Rules, ...]:
    """Return all rules, in the order in which they are looked at."""
    return tuple(one for topic in _TOPICS for one in topic.rules)
