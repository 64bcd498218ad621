"""The catalogue: every schedule that has a name, and how it is built.

A new schedule is one file under ``families`` and one ``Entry`` here, or, outside the package, one entry
point or one call of ``register``; ``docs/extending.md`` goes through an example.  The closed forms hold for
unit cost.
"""

import warnings
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path

from megatron_pp_ext.json_input import did_you_mean
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.check import check
from megatron_pp_ext.schedule.entry import (
    ALIASES,
    CSV_PREFIX,
    NO_PIPELINE,
    NOT_HERE,
    OTHERS,
    Abilities,
    Entry,
    Promise,
)
from megatron_pp_ext.schedule.families import (
    dualpipe_v,
    evaluation,
    gpipe,
    interleaved,
    one_f_one_b,
    one_f_one_b_v,
    v_shape,
    v_zero_bubble,
    zero_bubble,
)
from megatron_pp_ext.schedule.placement import Placement, Shape


def _from_p(p: int, m: int) -> bool:
    return m >= p


def _from_2p(p: int, m: int) -> bool:
    return m >= 2 * p


def _whole_groups(p: int, m: int) -> bool:
    return m % p == 0


_ENTRIES = (
    Entry(
        "gpipe",
        "all forwards, then all backwards; keeps every microbatch",
        "arXiv 1811.06965, figure 2c",
        Shape.LINEAR,
        1,
        gpipe.build,
        promise=Promise(lambda p, m: 3 * (m + p - 1), lambda p, m: m),
    ),
    Entry(
        "1f1b",
        "forwards and backwards in turn; keeps p microbatches",
        "arXiv 2006.09503, figure 2b",
        Shape.LINEAR,
        1,
        one_f_one_b.build,
        make_paired=one_f_one_b.build_paired,
        promise=Promise(lambda p, m: 3 * (m + p - 1), lambda p, m: min(p, m)),
    ),
    Entry(
        "interleaved",
        "1f1b with several chunks a rank; smaller bubble, more memory and messages",
        "arXiv 2104.04473, figure 4",
        Shape.LOOP,
        2,
        interleaved.build,
        make_paired=interleaved.build_paired,
        more_chunks=True,
        promise=Promise(lambda p, m: 6 * m + 3 * (p - 1), lambda p, m: min(3 * p - 1, 2 * m), _whole_groups),
    ),
    Entry(
        "breadth-first",
        "gpipe with several chunks a rank; smaller bubble, more messages",
        "arXiv 2211.05953",
        Shape.LOOP,
        2,
        gpipe.build_breadth_first,
        more_chunks=True,
        promise=Promise(lambda p, m: 6 * m + 3 * (p - 1), lambda p, m: 2 * m, _from_p),
    ),
    Entry(
        "1f1b-v",
        "two thirds of 1f1b's memory without splitting the backward",
        "arXiv 2405.15362, 1F1B-V",
        Shape.V,
        2,
        one_f_one_b_v.build,
        promise=Promise(
            lambda p, m: 6 * m + {2: 4, 3: 8, 6: 22}.get(p, 5 * p - (9, 5, 7)[p % 3]),
            lambda p, m: 2 * min((2 * p + 3) // 3, m),
            _from_p,
        ),
    ),
    Entry(
        "zb-h1",
        "1f1b's memory, a third of its bubble",
        "arXiv 2401.10241, figure 3, top",
        Shape.LINEAR,
        1,
        zero_bubble.build_h1,
        splits_backward=True,
        promise=Promise(lambda p, m: 3 * m + p - 1, lambda p, m: min(p, m), _from_p),
    ),
    Entry(
        "zb-h2",
        "no bubble within a rank, for nearly twice 1f1b's memory",
        "arXiv 2401.10241, figure 3, bottom",
        Shape.LINEAR,
        1,
        zero_bubble.build_h2,
        splits_backward=True,
        promise=Promise(lambda p, m: 3 * m + p - 1, lambda p, m: min(2 * p - 1, m), _from_p),
    ),
    Entry(
        "interleaved-zb",
        "interleaved with a split backward; 1f1b's memory",
        "arXiv 2401.10241, with the loop of 2104.04473",
        Shape.LOOP,
        2,
        interleaved.build_zero_bubble,
        splits_backward=True,
        more_chunks=True,
        promise=Promise(lambda p, m: 6 * m + p - 1, lambda p, m: 2 * min(p, m), _whole_groups),
    ),
    Entry(
        "v-min",
        "a third of 1f1b's memory, about 1f1b's bubble",
        "arXiv 2405.15362, figure 4",
        Shape.V,
        2,
        v_shape.build_min,
        splits_backward=True,
        promise=Promise(
            lambda p, m: 6 * m + (1 if p == 2 else 4 * p - (7, 5, 9)[p % 3]),
            lambda p, m: 2 * min((p + 4) // 3, m),
            _from_2p,
        ),
    ),
    Entry(
        "v-half",
        "half of 1f1b's memory, about half its bubble",
        "arXiv 2405.15362, figure 4",
        Shape.V,
        2,
        v_shape.build_half,
        splits_backward=True,
        promise=Promise(
            lambda p, m: 6 * m + (1 if p == 2 else 3 * p - (7, 4)[p % 2]),
            lambda p, m: 2 * min((p + 2) // 2, m),
            _from_p,
        ),
    ),
    Entry(
        "v-zb",
        "1f1b's memory, no bubble within a rank",
        "arXiv 2405.15362, figure 4",
        Shape.V,
        2,
        v_zero_bubble.build,
        splits_backward=True,
        promise=Promise(lambda p, m: 6 * m + p - 1, lambda p, m: 2 * min(p, m), _from_p),
    ),
    Entry(
        "dualpipe-v",
        "forwards and backwards of two microbatches in pairs; slightly more than 1f1b's memory",
        "arXiv 2412.19437, DualPipe",
        Shape.V,
        2,
        dualpipe_v.build,
        make_paired=dualpipe_v.build_paired,
        splits_backward=True,
        promise=Promise(lambda p, m: 6 * m + p - 1, lambda p, m: min(2 * p + 1, 2 * m), _from_2p),
    ),
)

ENTRIES = {entry.name: entry for entry in _ENTRIES}
"""All schedules by name."""

NAMES = tuple(ENTRIES)
"""The names, in the order of the catalogue: from the plainest to the most involved."""


def register(entry: Entry) -> None:
    """Add a schedule of your own, whose name all commands and flags then accept.

    It has to be called in every process, before Megatron reads its flags.  Raises ValueError for a name
    that is taken or not plain, and for an entry that contradicts the schedule that it builds.
    """
    global NAMES
    if entry.name != _plain(entry.name):
        raise ValueError(
            f"a schedule is called {entry.name!r}, but names are in lower case with hyphens: call it "
            f"{_plain(entry.name)!r}"
        )
    if entry.name in {*ENTRIES, *ALIASES, *NOT_HERE, NO_PIPELINE}:
        raise ValueError(f"a schedule is called {entry.name!r} already: choose another name")
    built = entry.build(2, 4)
    check(built)
    for field, stated, built_as in (
        ("name", entry.name, built.name),
        ("placement", entry.placement(2), built.placement),
        ("splits_backward", entry.splits_backward, built.splits_backward),
    ):
        if stated != built_as:
            raise ValueError(
                f"the entry of {entry.name!r} states {field} {stated}, but builds {built_as}: "
                "correct one of them"
            )
    ENTRIES[entry.name] = entry
    NAMES = tuple(ENTRIES)


def canonical(name: str) -> str:
    """Return the name here of the schedule that a person calls ``name``; an unknown name as it is.

    Case, spaces around it, and whether words are joined by "-" or "_" make no difference.  The path in
    ``csv:FILE`` stays as it is.
    """
    prefix, separator, path = name.strip().partition(":")
    if f"{prefix.lower()}{separator}" == CSV_PREFIX:
        return f"{CSV_PREFIX}{path}"
    plain = _plain(name)
    plain = ALIASES.get(plain, plain)
    is_known = plain in ENTRIES or plain in NOT_HERE or plain == NO_PIPELINE
    return plain if is_known else name


def entry(name: str) -> Entry:
    """Return the entry for ``name``, which may be an alias or spelled otherwise (``canonical``).

    Raises ValueError, with the nearest name or with the reason, if there is none.
    """
    name = canonical(name)
    if name in ENTRIES:
        return ENTRIES[name]
    if name in NOT_HERE:
        raise ValueError(f"schedule {name!r} is not offered here: {NOT_HERE[name]}")
    if name.startswith(CSV_PREFIX):
        raise ValueError(f"schedule {name!r} is a file: read it by read_csv, or look at it by mpp simulate")
    names = [*NAMES, *(other.name for other in OTHERS)]
    # The name that mpp list shows, whichever of the two resembles it.
    hint = did_you_mean(_plain(name), names) or did_you_mean(_plain(name), ALIASES)
    guess = f" ({hint})" if hint else ""
    raise ValueError(f"no schedule is called {name!r}{guess}, choose one of: {', '.join(names)}")


def abilities(name: str | None) -> Abilities:
    """Return the abilities of schedule ``name``; of Megatron's own for None or for an unknown name."""
    if name in ENTRIES:
        return ENTRIES[name].abilities
    if name is not None and name.startswith(CSV_PREFIX):
        return replace(_OTHERS[f"{CSV_PREFIX}FILE"], file=Path(name.removeprefix(CSV_PREFIX)))
    return _OTHERS.get(name or "", Abilities())


_OTHERS = {other.name: other.abilities for other in OTHERS}


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def require_pairs(entry: Entry) -> None:
    """Raise ValueError, with the names of the schedules that have pairs, unless ``entry`` is one of them."""
    if entry.make_paired is None:
        paired = ", ".join(name for name, other in ENTRIES.items() if other.make_paired)
        raise ValueError(
            f"schedule {entry.name!r} has no order in which a forward and a backward run as a pair: leave "
            f"pairs out, or use one of: {paired}"
        )


@lru_cache(maxsize=64)
def build(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, paired: bool = False
) -> Schedule:
    """Return the schedule ``name`` for ``ranks`` and ``microbatches``, checked.

    ``chunks`` is the number of stages a rank; None takes the entry's own.  ``paired`` asks for pairs of a
    forward and a backward.  Raises ValueError for an unknown name, for chunks the entry does not accept, for
    sizes it cannot be built for, and for pairs where the schedule has none.
    """
    definition = entry(name)
    if paired:
        require_pairs(definition)
    schedule = definition.build(ranks, microbatches, chunks, paired)
    check(schedule)
    return schedule


@lru_cache(maxsize=64)
def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Return the forwards of an evaluation with this placement, whichever schedule trains it; checked."""
    schedule = evaluation.build(placement, microbatches)
    check(schedule)
    return schedule


def _register_installed() -> None:
    """Add the schedules of other packages: the entry points of the group ``megatron_pp_ext.schedules``.

    Each names an ``Entry``.  A warning says which one is left out, and why.
    """
    for point in entry_points(group="megatron_pp_ext.schedules"):
        try:
            register(point.load())
        except Exception as error:
            package = point.dist.name if point.dist else "another package"
            warnings.warn(
                f"schedule {point.name!r} of {package} is left out ({type(error).__name__}: {error}): "
                f"correct {point.value}, or uninstall {package}",
                stacklevel=2,
            )


_register_installed()
