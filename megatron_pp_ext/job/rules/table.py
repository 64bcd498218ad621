"""The table of what cannot be combined.  Whoever imports it gets the rules of features, too."""

import megatron_pp_ext.features.rules  # noqa: F401
from megatron_pp_ext.job.rules.registry import TOPICS, Topic
from megatron_pp_ext.job.rules.rule import Rules


def topics() -> tuple[Topic, ...]:
    """Return all topics, in the order in which they are looked at."""
    return tuple(TOPICS)


def rules() -> tuple[Rules, ...]:
    """Return all rules, in the order in which they are looked at."""
    return tuple(one for topic in TOPICS for one in topic.rules)
