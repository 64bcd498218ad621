"""The form of a rule about what cannot be combined, and the one function that goes through rules."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.setting_error import SettingError

Condition = Callable[[RequestedJob], object]
"""A question to a job; what is true of the answer counts."""

Words = tuple[Callable[[RequestedJob], object], ...]
"""Functions whose values stand in a text, each in the place of its name in braces."""


_FLAG = re.compile(r"--[a-z][\w-]*( \S+)?")


@dataclass(frozen=True, slots=True)
class Rule:
    """A case that cannot be: ``flag``, ``why`` not, and its ``fix``.

    In all three ``{name}`` stands for the value of the argument ``name``, or for what one of the functions
    ``words`` returns, by its name.  A reason or a fix that is left out is that of its ``Rules``.
    ``when`` is whether it was requested.  A rule without it is about a flag as on a command line: alone or
    with any value, ``{name}``, it holds where the flag is set, and otherwise where it is set to that value.
    ``releases`` are those that the rule is about, such as ``transformer-engine<2.3``; without, it is about
    all.  Where the machine that trains is not known, a rule about some releases does not hold.
    """

    flag: str
    why: str = ""
    fix: str = ""
    when: Condition | None = field(default=None, kw_only=True)
    releases: str = field(default="", kw_only=True)
    words: Words = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError if ``flag`` is neither "--flag" nor "--flag value" and there is no ``when``."""
        if self.when is None and not _FLAG.fullmatch(self.flag):
            raise ValueError(f"a rule about {self.flag!r}, which is no flag with a value, needs when=")

    def holds(self, job: RequestedJob) -> bool:
        """Whether ``job`` has what cannot be, on such releases."""
        if self.releases and not _is_among(self.releases, job):
            return False
        return bool(self.when(job)) if self.when is not None else self._is_set(job)

    def _is_set(self, job: RequestedJob) -> bool:
        flag, _, value = self.flag.partition(" ")
        return job.is_set(flag, value if value and not value.startswith("{") else None)


def _always(job: RequestedJob) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules about the same thing: ``subject`` does not support what they name, ``when`` that is true.

    Without ``subject``, what a rule names is the subject of its reason.  ``title`` is for documents.  ``why``
    and ``fix`` are those of rules without their own, and ``or_else`` follows every fix.  Where a rule holds,
    ``auto`` as the value of the flag ``auto_of`` does not choose what the rules are about.
    """

    title: str
    rows: tuple[Rule, ...]
    when: Condition = _always
    subject: str = ""
    why: str = ""
    fix: str = "leave one of the two out"
    or_else: str = ""
    words: Words = ()
    auto_of: str = ""

    def broken(self, job: RequestedJob) -> Iterator[Rule]:
        if self.when(job):
            yield from (rule for rule in self.rows if rule.holds(job))

    def why_of(self, rule: Rule) -> str:
        """Return the reason of ``rule``, with names in the place of values."""
        return rule.why or self.why

    def fix_of(self, rule: Rule) -> str:
        """Return how to fix what breaks ``rule``, with names in the place of values."""
        return f"{rule.fix or self.fix}{self.or_else}"

    def template(self, rule: Rule) -> str:
        """Return the line of ``rule`` with names in the place of values."""
        start = f"{self.subject} does not support {rule.flag}:" if self.subject else rule.flag
        return f"{start} {self.why_of(rule)}; {self.fix_of(rule)}"

    def sentence(self, rule: Rule, job: RequestedJob) -> str:
        """Return the line that refuses ``job``: what was requested, the reason and the fix."""
        return self.template(rule).format_map(_Values(job, (*self.words, *rule.words)))


class _Values(dict[str, Any]):
    """The values of the names in a text."""

    def __init__(self, job: RequestedJob, words: Words) -> None:
        self._job, self._words = job, {function.__name__: function for function in words}

    def __missing__(self, name: str) -> Any:
        return self._words[name](self._job) if name in self._words else self._job.argument(name)


class Refused(SettingError):
    """The error of one line for a rule that was broken."""

    def __init__(self, line: str, rule: Rule) -> None:
        super().__init__(line)
        self.rule = rule


def refuse(job: RequestedJob, table: Iterable[Rules]) -> None:
    """Raise ``Refused`` for the first rule of ``table`` that ``job`` breaks."""
    for rules in table:
        for rule in rules.broken(job):
            raise Refused(rules.sentence(rule, job), rule)


def _is_among(releases: str, job: RequestedJob) -> bool:
    # This takes longer to import than a command has; few rules are about releases.
    from packaging.requirements import Requirement

    wanted = Requirement(releases)
    version = job.releases.get(wanted.name)
    return version is not None and wanted.specifier.contains(version, prereleases=True)
