"""What to say about a flag that Megatron does not have."""

from collections.abc import Iterable
from difflib import get_close_matches

from megatron_pp_ext.json_input import did_you_mean

_GONE = {"--use-legacy-models": "this Megatron has no other models than those of its core: leave it out"}
"""Flags of older releases that have no successor."""


def hint(flag: str, known: Iterable[str], otherwise: str) -> str:
    """Return the question whether one of ``known`` was meant, or ``otherwise`` if none resembles ``flag``.

    A word of the flag may be mistyped, missing or too many.  A flag with another word in its place is another
    flag, however few letters differ: ``--delay-param-gather`` does not mean ``--overlap-param-gather``.
    """
    if flag in _GONE:
        return _GONE[flag]
    return did_you_mean(flag, [one for one in known if _has_same_words(flag, one)], otherwise, cutoff=0.7)


def _has_same_words(flag: str, other: str) -> bool:
    words, others = flag.split("-"), other.split("-")
    left = [word for word in words if word not in others]
    right = [word for word in others if word not in words]
    return not right or all(get_close_matches(word, right, n=1) for word in left)
