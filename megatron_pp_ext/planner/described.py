"""What a planner's command line describes: a model by name or file, flags behind ``--``, and sizes by option.

All of it becomes one line of Megatron's flags.  Later words win: flags behind ``--`` over the model's own.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_pp_ext.planner import model_names, unknown_flags
from megatron_pp_ext.planner.model_names import GivenModel
from megatron_pp_ext.planner.step import flag_words
from megatron_pp_ext.planner.step.model_description import describe, flag


@dataclass(frozen=True, slots=True)
class Described:
    """The flags ``words``, and the arguments that they set; None where only Megatron's parser knows them.

    ``replaced`` is a sentence about the flags that took the place of the model's own; empty if none did.
    """

    words: list[str]
    args: Namespace | None
    replaced: str = ""


def read(
    flags: Sequence[str],
    model: str | None,
    sizes: Mapping[str, int | None] | None = None,
    has_other_flags: bool = False,
) -> Described:
    """Return what ``flags`` and the value of --model describe together.

    ``sizes`` are given by options, under the names of arguments.  ValueError where there is no model, for
    what contradicts itself, and for flags that Megatron cannot have, unless ``has_other_flags`` for those of
    a training script.
    """
    given = model_names.read(model) if model is not None else None
    if given is None and not flags:
        raise ValueError(
            "no model: give --model NAME (mpp models lists them) or FILE, or Megatron's flags behind --"
        )
    mine = _joined(flags, sizes or {})
    known = flag_words.read(mine)
    if known is None and not has_other_flags:
        unknown_flags.refuse(mine)
    if given is None:
        has_vocabulary = known is not None and {"vocab_size", "padded_vocab_size"} & known.keys()
        return Described(mine, _described(known, "the model") if known and has_vocabulary else None)
    kept = flag_words.overridden(given.values, mine)
    kept |= _longer_positions(given, kept, mine)
    words = [*flag_words.spelled(kept), *mine]
    args = None if known is None else _described({**kept, **known}, given.name)
    return Described(words, args, _replaced(given, kept, mine))


def _described(values: Mapping[str, object], where: str) -> Namespace:
    args = describe(values, where)
    args.vocab_size = args.vocab_size or args.padded_vocab_size
    if not args.vocab_size:
        raise ValueError(f"{where} has no vocab_size: give it")
    return args


def _replaced(given: GivenModel, kept: Mapping[str, object], mine: Sequence[str]) -> str:
    """Return which values of the model ``mine`` replaces by others."""
    now = {name: " ".join(behind) for name, behind in flag_words.by_name(mine)}
    changed = [
        f"{flag(name)} {now[flag(name)]} ({value})"
        for name, value in given.values.items()
        if name not in kept and value is not None and now.get(flag(name), str(value)) not in ("", str(value))
    ]
    return f"In the place of what {given.name} has (in brackets): {', '.join(changed)}" if changed else ""


def _longer_positions(given: GivenModel, kept: Mapping[str, object], mine: Sequence[str]) -> dict[str, int]:
    """Return more positions where ``mine`` asks for sequences that are longer than the model's.

    Rotary positions have no weights, and Megatron takes their number as a bound.  ValueError for sequences
    that are longer than the model's sliding window.
    """
    lengths = [behind for name, behind in flag_words.by_name(mine) if name == flag("seq_length")]
    if not lengths or len(lengths[-1]) != 1 or not lengths[-1][0].isdigit():
        return {}
    length = int(lengths[-1][0])
    if given.window is not None and length > given.window:
        raise ValueError(
            f"--seq-length {length} is longer than the sliding window of {given.name}, {given.window} "
            "tokens, and the planner counts whole attention: lower it"
        )
    positions = kept.get("max_position_embeddings")
    is_rotary = kept.get("position_embedding_type") == "rope"
    is_longer = is_rotary and isinstance(positions, int) and positions < length
    return {"max_position_embeddings": length} if is_longer else {}


def _joined(flags: Sequence[str], sizes: Mapping[str, int | None]) -> list[str]:
    """Return ``flags`` with the sizes that options give; ValueError where both say something else."""
    words = list(flags)
    parts = [part for word in words for part in word.split("=", 1)]
    for name, value in sizes.items():
        if value is None:
            continue
        if flag(name) not in parts:
            words += [flag(name), str(value)]
        elif (behind := parts[parts.index(flag(name)) + 1 : parts.index(flag(name)) + 2]) != [str(value)]:
            raise ValueError(
                f"{flag(name)} is {value}, but {' '.join(behind) or 'nothing'} behind --: leave one out"
            )
    return words
