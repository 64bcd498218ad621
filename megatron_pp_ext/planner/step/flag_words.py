"""The usual ones of Megatron's flags read without Megatron, whose parser takes seconds to import.

``read`` knows the flags of ``model_description`` and those that no cost and no rule of this package depends
on.  Any other flag, or another kind of value, it leaves to Megatron's parser.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_pp_ext.planner.step.model_description import DEFAULTS, SIZES, flag
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO, SHARED

NEGATED = {"add_bias_linear": "--disable-bias-linear"}
"""Arguments that are true by default, with the flag that turns each off."""

OTHER_FLAGS = {"fp8": "--fp8-format", "layernorm_epsilon": "--norm-epsilon"}
"""Arguments whose flag has another name."""

_VALUES = {
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--position-embedding-type": ("learned_absolute", "rope", "none"),
    "--transformer-impl": ("local", "transformer_engine"),
    "--attention-backend": ("auto", "unfused", "fused", "flash", "local"),
    "--fp8-format": ("e4m3", "hybrid"),
    "--optimizer": ("adam", "sgd"),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--tokenizer-type": ("NullTokenizer",),
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--pipeline-vocabulary": (SHARED, AUTO),
}
"""The values that are read here."""

_TEXTS = (
    "--pipeline-schedule", "--pipeline-model-parallel-layout", "--hybrid-layer-pattern",
    "--pipeline-memory-limit",
)  # fmt: skip

_COUNTS = (*SIZES, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_FLOATS = (
    "attention_dropout", "hidden_dropout", "layernorm_epsilon", "rope_scaling_factor", "sgd_momentum",
)  # fmt: skip
_MODULES = "--recompute-modules"

_UNCOUNTED: dict[str, Callable[[str], object] | None] = {
    **dict.fromkeys(("--mock-data", "--no-load-optim", "--no-load-rng", "--no-save-optim"), None),
    **dict.fromkeys(
        (
            "--train-iters", "--train-samples", "--eval-iters", "--eval-interval", "--save-interval",
            "--log-interval", "--seed", "--lr-decay-iters", "--lr-warmup-iters", "--num-workers",
            "--distributed-timeout-minutes",
        ),
        int,
    ),
    **dict.fromkeys(
        (
            "--lr", "--min-lr", "--weight-decay", "--clip-grad", "--adam-beta1", "--adam-beta2", "--adam-eps",
            "--init-method-std", "--lr-warmup-fraction",
        ),
        float,
    ),
    **dict.fromkeys(("--save", "--load", "--tensorboard-dir", "--split", "--lr-decay-style"), str),
}  # fmt: skip
"""Flags that no cost and no rule depends on, with the type of their value, None for those without one."""


def read(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments that ``words``, a command line, set; None where Megatron's parser has to read it.

    ValueError for a value that is no number where the flag needs one.
    """
    by_flag = {OTHER_FLAGS.get(name, flag(name)): name for name in DEFAULTS}
    off = {word: name for name, word in NEGATED.items()}
    found: dict[str, Any] = {}
    for word, given in by_name(words):
        name = by_flag.get(word)
        if word in off:
            if given:
                return None
            found[off[word]] = False
        elif word in _UNCOUNTED:
            kind = _UNCOUNTED[word]
            if len(given) != (kind is not None):
                return None
            if kind is not None:
                _converted(kind, word, given[0])
        elif name is None or name in NEGATED:
            return None
        elif isinstance(DEFAULTS[name], bool):
            if given:
                return None
            found[name] = True
        elif word == _MODULES:
            found[name] = given
        elif len(given) != 1:
            return None
        elif name in _COUNTS or (name == "moe_layer_freq" and given[0].isdigit()):
            found[name] = _converted(int, word, given[0])
        elif name in _FLOATS:
            found[name] = _converted(float, word, given[0])
        elif word in _TEXTS or given[0] in _VALUES.get(word, ()):
            found[name] = given[0]
        else:
            return None
    # What these allow depends on flags that are not read here.
    return found if catalog.abilities(found.get("pipeline_schedule")).flushes else None


def by_name(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a command line with the words behind it; a word without a flag goes by itself."""
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        behind = list(takewhile(lambda word: not word.startswith("--"), rest[1:]))
        yield rest[0], behind
        rest = rest[1 + len(behind) :]


def spelled(values: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line; None, and what is off without a flag, is left out."""
    words = []
    for name, value in values.items():
        if value is False and name in NEGATED:
            words.append(NEGATED[name])
        if value is None or value is False or (value is True and name in NEGATED):
            continue
        words.append(OTHER_FLAGS.get(name, flag(name)))
        if name == "moe_layer_freq":
            words.append(str(value).replace(" ", ""))  # Megatron reads a list as one word
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def overridden(values: Mapping[str, Any], by: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` without the arguments that ``by``, a command line, sets or rules out."""
    given = {name for name, _ in by_name(by)}
    given |= {other for name in given for other in _EXCLUSIVE.get(name, ())}
    return {
        name: value
        for name, value in values.items()
        if not {OTHER_FLAGS.get(name, flag(name)), NEGATED.get(name)} & given
    }


_EXCLUSIVE = {"--bf16": ("--fp16",), "--fp16": ("--bf16",), "--hybrid-layer-pattern": ("--num-layers",)}
"""Flags that take the place of others."""


def _converted(kind: Callable[[str], object], word: str, given: str) -> object:
    try:
        return kind(given)
    except ValueError:
        rule = "a whole number" if kind is int else "a number"
        raise ValueError(
            f"in the model's flags: {word} is {given!r}, but must be {rule}: correct it"
        ) from None
