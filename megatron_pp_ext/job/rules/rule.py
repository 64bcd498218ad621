"""The form of a rule about what cannot be asked together, and the one function that goes through them."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pp_ext.job.rules.asked import Asked
from megatron_pp_ext.job.rules.condition import holds


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that cannot be: what is asked, the reason and the fix.

    In all texts ``{name}`` stands for an attribute of ``Asked``.  ``asked`` tells whether it was asked, in
    the words of ``condition``; by default, whether the flag that ``what`` begins with is set, to the value
    behind it if ``what`` is a flag and a value.  ``releases`` are those that the rule is about, such as
    ``transformer-engine<2.3``; without, it is about all.  Where the machine that trains is not known, a rule
    about some releases does not hold.
    """

    what: str
    reason: str
    fix: str
    asked: str = ""
    releases: str = ""

    def holds(self, asked: Asked) -> bool:
        """Whether it was asked, on such releases."""
        if self.releases and not _is_among(self.releases, asked):
            return False
        return holds(self.asked or self._by_itself, asked)

    @property
    def _by_itself(self) -> str:
        """The condition that ``what`` says already."""
        flag, *behind = self.what.split()
        name = flag.removeprefix("--").replace("-", "_")
        return f"{name} is {behind[0]}" if len(behind) == 1 and behind[0][0] != "{" else name


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules about the same thing: ``beside`` cannot do with what they name, and only counts ``when`` it does.

    Without ``beside``, what a rule names is the subject of its reason.  ``title`` is for documents, and
    ``or_else`` follows every fix.
    """

    title: str
    when: str
    rows: tuple[Rule, ...]
    beside: str = ""
    or_else: str = ""

    def broken(self, asked: Asked) -> Iterator[Rule]:
        """Yield the rules that ``asked`` breaks."""
        if holds(self.when, asked):
            yield from (rule for rule in self.rows if rule.holds(asked))

    def sentence(self, rule: Rule, asked: Asked) -> str:
        """Return the line that refuses ``asked``: what was asked, the reason and the fix."""
        joined = f"{{beside}} does not support {rule.what}: " if self.beside else f"{rule.what} "
        joined = joined.replace("{beside}", self.beside)
        return f"{joined}{rule.reason}; {rule.fix}{self.or_else}".format_map(asked)


class Refused(ValueError):
    """The error of one line for a rule that was broken."""

    def __init__(self, line: str, rule: Rule) -> None:
        super().__init__(line)
        self.rule = rule


def read(topic: str) -> tuple[Rules, ...]:
    """Return the rules of ``topic``, which is the name of a file beside this one.

    A row has the values of a ``Rule``.  Those that it leaves out or empty are ``reason`` and ``fix`` of its
    group.  A group may have all ``rules_of`` another one, by its title.
    """
    content = tomllib.loads(Path(__file__).with_name(f"{topic}.toml").read_text(encoding="utf-8"))
    found: dict[str, Rules] = {}
    for group in content["group"]:
        title, like = group.get("title", ""), found.get(group.get("rules_of", ""))
        rows = like.rows if like else tuple(_row(group, *row) for row in group["rules"])
        others = {name: group.get(name, "") for name in ("when", "beside", "or_else")}
        found[title] = Rules(title, rows=rows, **others)
    return tuple(found.values())


def _row(group: dict[str, Any], what: str, reason: str = "", fix: str = "", *others: str) -> Rule:
    return Rule(what, reason or group["reason"], fix or group.get("fix", "leave one of the two out"), *others)


def refuse(asked: Asked, table: Iterable[Rules]) -> None:
    """Raise ``Refused`` for the first rule of ``table`` that ``asked`` breaks."""
    for rules in table:
        for rule in rules.broken(asked):
            raise Refused(rules.sentence(rule, asked), rule)


def _is_among(releases: str, asked: Asked) -> bool:
    # This takes longer to import than a command has; few rules are about releases.
    from packaging.requirements import Requirement

    wanted = Requirement(releases)
    version = asked.releases.get(wanted.name)
    return version is not None and wanted.specifier.contains(version, prereleases=True)
