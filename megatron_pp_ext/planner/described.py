"""The model of a planner's command line: a name or file, flags after ``--``, and sizes by option.

All of it becomes one line of Megatron's flags.  Later words win: flags after ``--`` over the model's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_pp_ext.job import ask_megatron, flag_table, flag_words
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.sizes import require_vocabulary
from megatron_pp_ext.planner import model_names
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from megatron_pp_ext.planner.step.model_description import derive_arguments, flag, require_complete


@dataclass(frozen=True, slots=True)
class Described:
    """The flags ``words``, and the job ``asked`` in them.

    ``notes`` are sentences about flags in place of the model's own, and about properties without a flag.
    """

    words: list[str]
    asked: RequestedJob
    notes: Sequence[str] = ()

    def counted(self, complete: Callable[[RequestedJob], RequestedJob] = lambda asked: asked) -> RequestedJob:
        """Return ``asked``; ValueError for a model whose costs are not known, and for one that cannot train.

        ``complete`` sets the arguments that are still open, as a search does for its candidates.

        ``vocab_size`` stays empty where only the tokenizer knows it.
        """
        asked = self.asked
        require_complete(asked.args, "the model")
        all_rules.refuse_to_plan(complete(asked))
        require_vocabulary(asked)
        return asked.with_arguments(
            vocab_size=asked.model.vocab_size or asked.model.padded_vocab_size or None
        )


def read(
    flags: Sequence[str],
    model: str | None,
    sizes: Mapping[str, int | None] | None = None,
    has_other_flags: bool = False,
) -> Described:
    """Read ``flags`` and the value of --model together.

    ``sizes`` are given by options, under the names of arguments.  ValueError where there is no model, for
    what contradicts itself, and for flags that the installed Megatron does not have, unless
    ``has_other_flags`` for those of a training script.
    """
    shipped = model_names.read(model) if model is not None else None
    if shipped is None and not flags:
        raise ValueError(
            "no model: give --model NAME (mpp models lists them) or FILE, or Megatron's flags after --"
        )
    mine = _joined(flags, sizes or {})
    kept = {} if shipped is None else flag_words.overridden(shipped.values, mine)
    if shipped is not None:
        kept |= _longer_positions(shipped, kept, mine)
    start = {name: value for name, value in kept.items() if value is not None}
    args, rest = flag_table.parse(mine, start)
    unknown = [] if has_other_flags else flag_table.unknown(rest)
    uncounted = [_of_megatron_alone(unknown, mine)] if unknown else []
    derive_arguments(args)
    if shipped is None:
        return Described(mine, RequestedJob.of_args(args), uncounted)
    require_complete(args, shipped.name)
    if not args.vocab_size and not args.padded_vocab_size:
        raise ValueError(f"{shipped.name} has no vocab_size: give it")
    about = [f"{shipped.name}: {'; '.join(shipped.notes)}"] if shipped.notes else []
    notes = [*uncounted, *_replaced(shipped, kept, mine), *about]
    return Described([*flag_words.spelled(kept), *mine], RequestedJob.of_args(args), notes)


def _of_megatron_alone(flags: Sequence[str], words: Sequence[str]) -> str:
    """Return words about ``flags`` of a command line that only the installed Megatron knows.

    ``UnknownFlag`` for what it does not know either, and where it cannot be asked.
    """
    for word in flags if (unknown := ask_megatron.unknown_words(words)) is None else unknown:
        raise flag_table.UnknownFlag(word)
    return (
        f"Megatron {ask_megatron.release()} has {', '.join(flags)}, of which nothing is known here: "
        "estimates are made without"
    )


def _replaced(model: GivenModel, values: Mapping[str, object], words: Sequence[str]) -> list[str]:
    """Return which values of the model ``words`` replaces by others, as a sentence if there are any."""
    now = {name: " ".join(flag_values) for name, flag_values in flag_words.by_argument(words).items()}
    changed = [
        f"{flag(name)} {now[name]} ({value})"
        for name, value in model.values.items()
        if name not in {*values, *model.assumed}
        and value is not None
        and now.get(name, str(value)) not in ("", str(value))
    ]
    return [f"In the place of what {model.name} has (in brackets): {', '.join(changed)}"] if changed else []


def _longer_positions(
    model: GivenModel, values: Mapping[str, object], words: Sequence[str]
) -> dict[str, int]:
    """Return positions for the sequences of ``words`` where the model has fewer, or leaves them open.

    Rotary positions have no weights, and Megatron takes their number as a bound.  ValueError for sequences
    that are longer than Megatron trains as the model would.
    """
    text = " ".join(flag_words.by_argument(words).get("seq_length", ()))
    if not text.isdigit():
        return {}
    length = int(text)
    if model.longest is not None and length > model.longest:
        raise ValueError(
            f"--seq-length {length} is longer than the chunks of {model.longest} tokens in which "
            f"{model.name} attends, and Megatron's attention has no chunks: lower it"
        )
    positions = values.get("max_position_embeddings", length)
    is_rotary = values.get("position_embedding_type") == "rope"
    is_longer = is_rotary and isinstance(positions, int) and positions < length
    return {"max_position_embeddings": length} if is_longer or positions is None else {}


def _joined(flags: Sequence[str], sizes: Mapping[str, int | None]) -> list[str]:
    """Return ``flags`` with the sizes that options give; ValueError where they differ."""
    words, by_argument = list(flags), flag_words.by_argument(flags)
    for name, value in sizes.items():
        flag_values = by_argument.get(name)
        if value is not None and flag_values is None:
            words += [flag(name), str(value)]
        elif value is not None and flag_values != [str(value)]:
            text = " ".join(flag_values or ()) or "nothing"
            raise ValueError(f"{flag(name)} is {value}, but {text} after --: leave one out")
    return words
