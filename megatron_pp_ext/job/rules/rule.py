"""The form of a rule about what cannot be asked together, and the one function that goes through them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_pp_ext.job.rules.asked import Asked

Test = Callable[[Asked], object]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that cannot be: what is asked, the reason and the fix.

    In all texts ``{name}`` stands for an attribute of ``Asked``.  ``asked`` tells whether it was asked; by
    default, whether the flag that ``what`` begins with is set.  ``releases`` are those that the rule is
    about, such as ``transformer-engine<2.3``; without, it is about all.  Where the machine that trains is
    not known, a rule about some releases does not hold.
    """

    what: str
    reason: str
    fix: str = "leave one of the two out"
    asked: Test | None = None
    releases: str = ""

    def holds(self, asked: Asked) -> bool:
        """Whether it was asked, on such releases."""
        if self.releases and not _is_among(self.releases, asked):
            return False
        return bool(self.asked(asked) if self.asked else asked.is_set(self.what.split()[0]))


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules about the same thing: ``beside`` cannot do with what they name, and only counts ``when`` it does.

    Without ``beside``, what a rule names is the subject of its reason.  ``title`` is for documents, and
    ``or_else`` follows every fix.
    """

    title: str
    when: Test
    rows: tuple[Rule, ...]
    beside: str = ""
    or_else: str = ""

    def broken(self, asked: Asked) -> Iterator[Rule]:
        """Yield the rules that ``asked`` breaks."""
        if self.when(asked):
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
