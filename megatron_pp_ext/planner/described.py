"""The command line of a planner: a model by name or file, flags after ``--``, and sizes by option."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.job import ask_megatron, flag_table
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.sizes import require_vocabulary
from megatron_pp_ext.json_input import did_you_mean, naming, parse, require_printable
from megatron_pp_ext.json_input import read as read_json
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from megatron_pp_ext.planner.step import model_description
from megatron_pp_ext.planner.step.model_description import derive_arguments, flag, require_complete

if TYPE_CHECKING:
    from megatron_pp_ext.planner.recipe import Recipe

_MODELS = resources.files("megatron_pp_ext.planner") / "models"


@dataclass(frozen=True, slots=True)
class Named:
    """A named model: ``parameters`` as published, with their ``source``, and its arguments for Megatron.

    The models are the JSON files of ``planner/models``: a Hugging Face configuration each, with the source of
    its figures, the number of parameters as published, and the sequence length to plan with.
    ``other_names`` are from the table in the same folder.
    """

    name: str
    title: str
    source: str
    parameters: float
    described: GivenModel
    other_names: tuple[str, ...]


def names() -> list[str]:
    """Return the names of all models that are shipped."""
    files = (item.name for item in _MODELS.iterdir())
    return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))


@cache
def _table() -> Mapping[str, Any]:
    """Return the table of other names, publishers and ends of names."""
    return tomllib.loads((_MODELS / "other_names.toml").read_text(encoding="utf-8"))


def other_names() -> dict[str, tuple[str, ...]]:
    """Return the other names of models that are shipped, by their names."""
    return {name: tuple(words.split()) for name, words in _table()["names"].items()}


_DASHES = re.compile(r"(?<=[a-z])-(?=[0-9])")
"""The dashes between a word and a number, which some names have and others not."""


def plain(name: str) -> str:
    """Return ``name`` as names of models are compared."""
    spelled = name.strip().lower().replace("_", "-")
    publisher, _, rest = spelled.partition("/")
    spelled = rest if publisher in _table()["publishers"].split() else spelled
    ends = tuple(_table()["ends"].split())
    while spelled.endswith(ends):
        spelled = spelled.rpartition("-")[0]
    return _DASHES.sub("", spelled)


@cache
def _by_plain_name() -> dict[str, str]:
    """Return the names of all models that are shipped, by each of their names as these are compared."""
    spellings = [(word, name) for name, words in other_names().items() for word in words]
    return {plain(word): name for word, name in [*spellings, *((name, name) for name in names())]}


def named(name: str) -> Named:
    """Return the shipped model ``name``."""
    content = parse((_MODELS / f"{name}.json").read_text(encoding="utf-8"), "install the package again")
    described = config_json.read(content["config"])
    values = {**described.values, "seq_length": content["seq_length"]}
    about = (content["title"], content["source"], content["parameters"])
    model = replace(described, name=name, values=values, assumed=described.assumed - {"seq_length"})
    return Named(name, *about, model, other_names().get(name, ()))


def read_model(name: str) -> GivenModel:
    """Return the model that ``--model given`` names.

    It is a shipped name, a Hugging Face config.json or its folder, or a JSON object of Megatron's names.
    ValueError, naming the file or the name, for anything else and for models that are not supported.
    """
    path = Path(name)
    path = _file_of_folder(path) if path.is_dir() else path
    shipped = _by_plain_name().get(plain(name))
    if shipped is not None and not path.is_file():
        return named(shipped).described
    if not path.is_file():
        if path.suffix == ".json":
            raise ValueError(f"{path}: No such file or directory; correct --model")
        hint = did_you_mean(plain(name), _spelled(), "no shipped model resembles it")
        raise ValueError(f"--model {name} is neither a file nor a name: {hint} (mpp models lists them)")
    with naming(path):
        content = read_json(path, "write an object of Megatron's names")
        if not isinstance(content, dict):
            raise ValueError("is no object: write one of Megatron's names, such as num_layers")
        config_json.refuse_other_files(content)
        if config_json.is_config(content):
            return replace(config_json.read(content), name=name)
        for name, value in content.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    with naming(name):
                        require_printable(text)
    model_description.require_known(content, str(path))
    return GivenModel(name, content)


def _spelled() -> list[str]:
    """Return all names of models that are shipped, as they are listed."""
    return [*names(), *(other for words in other_names().values() for other in words)]


def _file_of_folder(folder: Path) -> Path:
    """Return the file that describes the model of ``folder``, or that of its adapter where it is alone."""
    file, adapter = folder / "config.json", folder / "adapter_config.json"
    return adapter if adapter.is_file() and not file.is_file() else file


FROM_HUGGING_FACE = "HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer"
"""The types of tokenizers that are a folder, or would be downloaded."""

_FIX = "give --vocab-size"


def size(job: RequestedJob) -> int:
    """Return the tokens of the tokenizer in the folder --tokenizer-model, or else of the model there.

    ValueError where there is no such folder, and where its files do not have the number.

    Megatron would download a tokenizer that is not on this machine.
    """
    if not job.flags.tokenizer_model:
        raise ValueError(
            f"--tokenizer-type {job.flags.tokenizer_type} needs --tokenizer-model, the folder whose "
            "vocabulary would be counted: give it, or --vocab-size"
        )
    folder = Path(job.flags.tokenizer_model)
    flag = f"--tokenizer-model {job.flags.tokenizer_model}"
    if not folder.is_dir():
        raise ValueError(
            f"{flag} is no folder here, and would be downloaded for the size of its vocabulary: {_FIX}"
        )
    for name, count in (("tokenizer.json", _tokens), ("config.json", _rows)):
        if (folder / name).is_file():
            with naming(folder / name):
                tokens = count(read_json(folder / name, _FIX))
            if tokens:
                return tokens
    raise ValueError(f"{flag} has neither a tokenizer.json nor a config.json with its vocabulary: {_FIX}")


def _tokens(content: Any) -> int:
    """Return the number of tokens in a tokenizer.json, with the tokens added to its model."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return 0
    vocabulary, added = content["model"].get("vocab", ()), content.get("added_tokens", ())
    texts = vocabulary if isinstance(vocabulary, dict) else [token for token, *_ in vocabulary]
    return len({*texts, *(entry["content"] for entry in added)})


def _rows(content: Any) -> int:
    """Return the rows of the embedding in a config.json; 0 where it has none."""
    if not isinstance(content, dict):
        return 0
    inner = content.get("text_config", content)
    rows = inner.get("vocab_size", 0) if isinstance(inner, dict) else 0
    return rows if isinstance(rows, int) else 0


FULL_PRECISION = (
    "Warning: all is computed in fp32, without fused attention, since no flag says otherwise: add --bf16 if "
    "you train in half precision"
)
"""The note about a job that says nothing of its precision."""


@dataclass(frozen=True, slots=True)
class Described:
    """The flags ``words``, and the ``job`` in them.

    ``notes`` are sentences about flags in place of the model's own, and about properties without a flag.
    """

    words: list[str]
    job: RequestedJob
    notes: Sequence[str] = ()

    def counted(self, complete: Callable[[RequestedJob], RequestedJob] = lambda job: job) -> RequestedJob:
        """Return ``job``; ValueError for a model whose costs are not known, and for one that cannot train.

        ``complete`` sets the arguments that are still open, as a search does for its candidates.

        ``vocab_size`` stays empty where only the tokenizer knows it.
        """
        job = self.job
        require_complete(job.args, "the model")
        all_rules.refuse_to_plan(complete(job))
        require_vocabulary(job)
        return job.with_arguments(vocab_size=job.model.vocab_size or job.model.padded_vocab_size or None)


def read(
    flags: Sequence[str],
    model: str | None,
    sizes: Mapping[str, int | None] | None = None,
    has_other_flags: bool = False,
    recipe: "Recipe | None" = None,
) -> Described:
    """Read ``flags`` and the value of --model together, or the job of a ``recipe`` in its place.

    ``sizes`` are given by options, under the names of arguments.  ValueError where there is no model, for
    what contradicts itself, and for flags that the installed Megatron does not have, unless
    ``has_other_flags`` for those of a training script.

    All of it becomes one line of Megatron's flags.  Later words win: flags after ``--`` over the model's own.
    """
    if recipe is not None and model is not None:
        raise ValueError(
            f"--recipe {recipe.name} has a model, so that --model {model} is one too many: leave one out"
        )
    shipped = None if recipe is None else recipe.model(flags)
    if model is not None:
        shipped = read_model(model)
    if shipped is None and not flags:
        raise ValueError(
            "no model: give --model NAME (mpp models lists them) or FILE, or Megatron's flags after --"
        )
    mine = _joined(flags, sizes or {})
    defaults = {} if shipped is None else flag_table.overridden(shipped.values, mine)
    if shipped is not None:
        defaults |= _longer_positions(shipped, defaults, mine)
    start = {name: value for name, value in defaults.items() if value is not None}
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
    notes = [*uncounted, *_replaced(shipped, defaults, mine), *about]
    return Described([*flag_table.spelled(defaults), *mine], RequestedJob.of_args(args), notes)


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
    now = {name: " ".join(flag_values) for name, flag_values in flag_table.by_argument(words).items()}
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
    text = " ".join(flag_table.by_argument(words).get("seq_length", ()))
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
    words, by_argument = list(flags), flag_table.by_argument(flags)
    for name, value in sizes.items():
        flag_values = by_argument.get(name)
        if value is not None and flag_values is None:
            words += [flag(name), str(value)]
        elif value is not None and flag_values != [str(value)]:
            text = " ".join(flag_values or ()) or "nothing"
            raise ValueError(f"{flag(name)} is {value}, but {text} after --: leave one out")
    return words
