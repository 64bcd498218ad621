"""The flags that training needs, and the error that names those that are missing.

Megatron ends with a bare AssertionError or TypeError where one of them is missing, often only when process
groups exist and the model is built.
"""

import linecache
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

OUR_SCRIPT = "is_pretrain_gpt"
"""The argument that is true where ``megatron_pp_ext.pretrain_gpt`` trains; no flag sets it."""

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

_Value = Callable[[str], Any]
"""Returns the value of an argument by its name, None where neither a flag nor a default gives one."""


class _Need(NamedTuple):
    """What is needed: the flag with a value that works, and a test for its absence."""

    fix: str | Callable[[_Value], str]
    is_missing: Callable[[_Value], bool]


def _without(name: str, *others: str) -> Callable[[_Value], bool]:
    """Return the test for the absence of ``name`` and of all ``others``, each of which can stand for it."""
    return lambda value: all(value(one) is None for one in (name, *others))


def _position_embeddings(value: _Value) -> str:
    length = value("seq_length") or value("encoder_seq_length")
    return f"--max-position-embeddings {length or 2048} (--seq-length or more)"


_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_PATTERN = ("hybrid_layer_pattern", "hybrid_override_pattern")

_BY_ALL = (
    _Need("--num-layers 32", _without("num_layers", "encoder_num_layers", *_PATTERN, *_HETEROGENEOUS)),
    _Need("--hidden-size 4096", _without("hidden_size", *_HETEROGENEOUS)),
    _Need("--num-attention-heads 32", _without("num_attention_heads", *_HETEROGENEOUS)),
    _Need("--seq-length 2048", _without("seq_length", "encoder_seq_length")),
    _Need(_position_embeddings, _without("max_position_embeddings", *_HETEROGENEOUS)),
    _Need("--micro-batch-size 1", _without("micro_batch_size")),
    _Need(
        "--save-interval 1000 (steps between two checkpoints; --save needs it)",
        lambda value: value("save") is not None and not value("save_interval"),
    ),
)
"""What Megatron's validation asserts, whatever the script."""

_BY_TRAINING = (
    _Need(
        "--train-iters 1000",
        lambda value: not (value("train_iters") or value("train_samples") or value("skip_train")),
    ),
    _Need("--lr 1e-4", lambda value: value("lr") is None and not value("skip_train")),
    _Need(
        "--eval-interval 1000 (steps between two evaluations; needed even with --eval-iters 0)",
        lambda value: not (value("eval_interval") or value("skip_train") or value("full_validation")),
    ),
)
"""What training needs in addition."""

_DATA = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
_WITH_MODEL = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "SFTTokenizer",
)

_BY_OUR_SCRIPT = (
    _Need(
        "--data-path PREFIX (of PREFIX.bin and PREFIX.idx) or --mock-data",
        lambda value: not value("mock_data") and all(value(name) is None for name in _DATA),
    ),
    _Need(
        "--tokenizer-type, the one of your data (NullTokenizer --vocab-size 257 for --mock-data and for what "
        "megatron_pp_ext.text_data wrote)",
        _without("tokenizer_type", "vocab_file"),
    ),
    _Need(
        "--vocab-size 257 (the number of tokens; NullTokenizer needs it)",
        lambda value: value("tokenizer_type") == "NullTokenizer" and value("vocab_size") is None,
    ),
    _Need(
        lambda value: f"--tokenizer-model PATH (the model of {value('tokenizer_type')})",
        lambda value: value("tokenizer_type") in _WITH_MODEL and value("tokenizer_model") is None,
    ),
)
"""What ``megatron_pp_ext.pretrain_gpt`` needs in addition."""


def require_valid(args: Namespace, defaults: Mapping[str, Any] = NO_DEFAULTS) -> None:
    """Raise ValueError if Megatron's validation would miss a flag; ``defaults`` are those of the script."""
    _require(_BY_ALL, args, defaults)


def require_trainable(args: Namespace) -> None:
    """Raise ValueError if flags without which no script can train are missing."""
    _require(_BY_TRAINING, args)


def require_for_our_script(args: Namespace) -> None:
    """Raise ValueError if flags without which ``pretrain_gpt`` cannot train are missing; all at once."""
    _require((*_BY_ALL, *_BY_TRAINING, *_BY_OUR_SCRIPT), args)


def _require(needs: tuple[_Need, ...], args: Namespace, defaults: Mapping[str, Any] = NO_DEFAULTS) -> None:
    def value(name: str) -> Any:
        given = getattr(args, name, None)
        return defaults.get(name) if given is None else given

    missing = [
        need.fix if isinstance(need.fix, str) else need.fix(value) for need in needs if need.is_missing(value)
    ]
    if missing:
        raise ValueError(f"flags are missing; add, for example, {', '.join(missing)}")


def failed_check(error: Exception) -> str:
    """Return in one line which check of Megatron's raised ``error``, since many of them have no message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    said = " ".join(str(error).split())
    if trace is None:
        return said
    frame, line = trace.tb_frame, trace.tb_lineno
    check = said or linecache.getline(frame.f_code.co_filename, line).strip().rstrip(",\\ ")
    return f"{check} ({frame.f_globals.get('__name__')}, line {line})"


WORKAROUND = Workaround(
    "a flag that training needs is missing: a bare AssertionError, often after the model is built",
    EVERY,
    "tests/integration/test_needed_flags.py",
)
