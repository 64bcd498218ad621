"""The words in which a rule tells what it is about: ``optimizer is sgd, not sgd_momentum``.

Parts with commas between are all true.  Each begins with an attribute of ``Asked``, or of what that has,
where AttributeError tells a name that is misspelled:

NAME          it is neither none, off nor 0
NAME given    it is not None
NAME changed  the argument has another value than the installed Megatron gives it
NAME is A     it is A, or has A among others; or one of several in ``NAME is A or B``
NAME above N  it is a number above N
not ...       the opposite
"""

from functools import reduce
from typing import Any

from megatron_pp_ext.job import flag_effects
from megatron_pp_ext.job.rules.asked import Asked


def holds(condition: str, asked: Asked) -> bool:
    """Whether ``condition`` is true of ``asked``; an empty one is."""
    return all(_is_true(part, asked) for part in condition.split(", ") if part)


def _is_true(part: str, asked: Asked) -> bool:
    name, *words = part.split()
    if name == "not":
        return not _is_true(" ".join(words), asked)
    start: Any = asked
    found = reduce(
        lambda one, attribute: None if one is None else getattr(one, attribute), name.split("."), start
    )
    match words:
        case []:
            return bool(found)
        case ["given"]:
            return found is not None
        case ["changed"]:
            return flag_effects.is_asked(asked, name)
        case ["is", *values]:
            values_found = found if isinstance(found, list | tuple | frozenset) else [found]
            return not set(values).isdisjoint(map(str, values_found))
        case ["above", number]:
            return bool((found or 0) > float(number))
    raise ValueError(f"a rule asks for {part!r}: write it as job/rules/condition.py says")
