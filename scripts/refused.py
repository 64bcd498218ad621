"""Write docs/refused.md, the list of what cannot be asked together, from the table of rules.

python -m scripts.refused
"""

import re
from pathlib import Path

from megatron_pp_ext.job import flag_effects
from megatron_pp_ext.job.rules import all_rules, schedules, stock
from megatron_pp_ext.job.rules.rule import Rule, Rules

_FIRST = "schedules", "stock", "vocabulary", "pairs", "offload", "without_flush"
"""The topics that most readers look for, in the order of the document; the others follow."""


def _in_order() -> list[Rules]:
    topics = {topic.name: topic.rules for topic in all_rules.topics()}
    others = [name for name in topics if name not in _FIRST]
    written = [rules for name in (*_FIRST, *others) for rules in topics[name]]
    return [*written, *flag_effects.lacks_costs(), *stock.PLANNED, *schedules.CONFIG, schedules.TURNED_OFF]


FILE = Path(__file__).parents[1] / "docs" / "refused.md"

HEAD = """\
# What is refused

<!-- written by scripts/refused.py from megatron_pp_ext/job/rules -->

Training and every command refuse these flags before anything starts, in one line with the reason and the fix.
Words *like these* stand for what the job has. Values that cannot be read, and sizes that do not divide each
other, are refused too, by an error that names the nearest that works.

What `mpp estimate` and `mpp search` refuse with the advice to measure the job, training refuses where it
predicts its stages from the model's sizes: under `flex` and `auto`, and for `auto` as layout or vocabulary.
Measured stages (`--pipeline-costs`) and all other schedules go with it.
"""


def text() -> str:
    """Return the document."""
    return "\n".join([HEAD, *(_section(rules) for rules in _in_order() if rules.title)])


def _section(rules: Rules) -> str:
    rows = [_row(rules, rule) for rule in rules.rows]
    return "\n".join([f"## {rules.title}\n", "| asked | why not | instead |", "|---|---|---|", *rows, ""])


def _row(rules: Rules, rule: Rule) -> str:
    flags, reason, fix = map(marked, (rule.flag, rules.why_of(rule), rules.fix_of(rule)))
    releases = f" (with {marked(rule.releases)})" if rule.releases else ""
    return f"| {flags}{releases} | {reason} | {fix} |"


def marked(words: str) -> str:
    """Return ``words`` of a rule with flags as code."""
    words = re.sub(r"--([a-z][a-z-]+) \{(\w+)\}", _without_own_value, words)
    words = re.sub(r"\{(\w+)\}", lambda match: f"*{match[1].replace('_', ' ')}*", words)
    words = re.sub(r"(?<![\w`'-])(--[a-z][\w-]*)", r"`\1`", words)
    words = re.sub(r"(transformer-engine(?:<|==)[\d.]+)", r"`\1`", words)
    return words.replace("|", "\\|")


def _without_own_value(match: re.Match[str]) -> str:
    flag, name = match.groups()
    return f"--{flag}" if flag.replace("-", "_") == name else match[0]


if __name__ == "__main__":
    FILE.write_text(text())
