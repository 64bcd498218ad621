"""What a planner's command line describes: a model by name or file, flags after ``--``, and sizes by option.

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
from megatron_pp_ext.planner.step.model_description import flag, require_complete, settle


@dataclass(frozen=True, slots=True)
class Described:
    """The flags ``words``, and what is ``asked`` in them.

    ``notes`` are sentences about flags that took the place of the model's own, and about what no flag says.
    """

    words: list[str]
    asked: RequestedJob
    notes: Sequence[str] = ()

    def counted(self, settle: Callable[[RequestedJob], RequestedJob] = lambda asked: asked) -> RequestedJob:
        """Return ``asked``; ValueError for a model whose costs are not known, and for what cannot be trained.

        ``settle`` sets what is not known yet, as a search does for its candidates.

        ``vocab_size`` stays empty where only the tokenizer knows it.
        """
        asked = self.asked
        require_complete(asked.args, "the model")
        all_rules.refuse_to_plan(settle(asked))
        require_vocabulary(asked)
        return asked.changed(vocab_size=asked.model.vocab_size or asked.model.padded_vocab_size or None)


def read(
    flags: Sequence[str],
    model: str | None,
    sizes: Mapping[str, int | None] | None = None,
    has_other_flags: bool = False,
) -> Described:
    """Return what ``flags`` and the value of --model describe together.

    ``sizes`` are given by options, under the names of arguments.  ValueError where there is no model, for
    what contradicts itself, and for flags that the installed Megatron does not have, unless
    ``has_other_flags`` for those of a training script.
    """
    given = model_names.read(model) if model is not None else None
    if given is None and not flags:
        raise ValueError(
            "no model: give --model NAME (mpp models lists them) or FILE, or Megatron's flags after --"
        )
    mine = _joined(flags, sizes or {})
    kept = {} if given is None else flag_words.overridden(given.values, mine)
    if given is not None:
        kept |= _longer_positions(given, kept, mine)
    start = {name: value for name, value in kept.items() if value is not None}
    args, rest = flag_table.parse(mine, start)
    unknown = [] if has_other_flags else flag_table.unknown(rest)
    uncounted = [_of_megatron_alone(unknown, mine)] if unknown else []
    settle(args)
    if given is None:
        return Described(mine, RequestedJob(args), uncounted)
    require_complete(args, given.name)
    if not args.vocab_size and not args.padded_vocab_size:
        raise ValueError(f"{given.name} has no vocab_size: give it")
    about = [f"{given.name}: {'; '.join(given.notes)}"] if given.notes else []
    notes = [*uncounted, *_replaced(given, kept, mine), *about]
    return Described([*flag_words.spelled(kept), *mine], RequestedJob(args), notes)


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


def _replaced(given: GivenModel, kept: Mapping[str, object], mine: Sequence[str]) -> list[str]:
    """Return which values of the model ``mine`` replaces by others, as a sentence if there are any."""
    now = {name: " ".join(behind) for name, behind in flag_words.by_argument(mine).items()}
    changed = [
        f"{flag(name)} {now[name]} ({value})"
        for name, value in given.values.items()
        if name not in {*kept, *given.assumed}
        and value is not None
        and now.get(name, str(value)) not in ("", str(value))
    ]
    return [f"In the place of what {given.name} has (in brackets): {', '.join(changed)}"] if changed else []


def _longer_positions(given: GivenModel, kept: Mapping[str, object], mine: Sequence[str]) -> dict[str, int]:
    """Return positions for the sequences of ``mine`` where the model has fewer, or leaves them open.

    Rotary positions have no weights, and Megatron takes their number as a bound.  ValueError for sequences
    that are longer than those that Megatron trains as the model would.
    """
    behind = " ".join(flag_words.by_argument(mine).get("seq_length", ()))
    if not behind.isdigit():
        return {}
    length = int(behind)
    if given.longest is not None and length > given.longest:
        raise ValueError(
            f"--seq-length {length} is longer than the chunks of {given.longest} tokens in which "
            f"{given.name} attends, and Megatron's attention has no chunks: lower it"
        )
    positions = kept.get("max_position_embeddings", length)
    is_rotary = kept.get("position_embedding_type") == "rope"
    is_longer = is_rotary and isinstance(positions, int) and positions < length
    return {"max_position_embeddings": length} if is_longer or positions is None else {}


def _joined(flags: Sequence[str], sizes: Mapping[str, int | None]) -> list[str]:
    """Return ``flags`` with the sizes that options give; ValueError where both say something else."""
    words, given = list(flags), flag_words.by_argument(flags)
    for name, value in sizes.items():
        behind = given.get(name)
        if value is not None and behind is None:
            words += [flag(name), str(value)]
        elif value is not None and behind != [str(value)]:
            said = " ".join(behind or ()) or "nothing"
            raise ValueError(f"{flag(name)} is {value}, but {said} after --: leave one out")
    return words
