"""The command lines of training runs, and the flags of short ones that measure something."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = dict.fromkeys(("--save", "--load", "--tensorboard-dir", "--pipeline-trace", "--profile-pipeline"), 1)
"""Flags that name files of the real run, which a short one must not touch."""

_DATA = (
    "--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--valid-data-path",
    "--test-data-path", "--per-split-data-args-path",
)  # fmt: skip


def torchrun(ranks: int) -> list[str]:
    """Return the start of a command line: torchrun with ``ranks`` ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def training(
    flags: Sequence[str], ranks: int | None, script: Path | None = None, cpu: bool | None = None
) -> list[str]:
    """Return the command line that trains with ``flags``.

    It starts ``ranks`` ranks by torchrun, or a single process if ``ranks`` is None.  They run ``script``, or
    this package's pretrain_gpt without one, on the CPU if ``cpu``, which by default is so without a GPU.
    ModuleNotFoundError where there is no torch: the process that is started would say so in its log alone.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if cpu is None:
        import torch

        cpu = not torch.cuda.is_available()
    launcher = [sys.executable] if ranks is None else torchrun(ranks)
    module = "megatron_pp_ext.pretrain_gpt" if script is None else "megatron_pp_ext"
    return [*launcher, "-m", module, *["--cpu"] * cpu, *([] if script is None else [str(script)]), *flags]


def words_of(flags: Iterable[str]) -> list[str]:
    """Return ``flags`` with each ``--name=value`` as two words."""
    return [word for flag in flags for word in flag.split("=", 1)]


def last(words: Sequence[str], name: str) -> str | None:
    """Return the word after the last flag ``name``, "" where there is none; None without the flag."""
    if name not in words:
        return None
    at = len(words) - words[::-1].index(name)
    return words[at] if at < len(words) else ""


def whole_number(words: Sequence[str], name: str, default: int = 1) -> int:
    """Return the number after the last flag ``name``, or ``default`` where it is not given."""
    value = last(words, name)
    try:
        return default if value is None else int(value)
    except ValueError:
        raise ValueError(f"{name} needs a whole number after it: correct the model's flags") from None


def missing(flags: Sequence[str]) -> list[str]:
    """Return placeholders for the flags that Megatron needs for training and ``flags`` lack.

    None of them changes the costs of a step.  The model's sizes are not among them.
    """
    words = words_of(flags)
    words_given = set(words)
    length = last(words, "--seq-length")
    is_computed_again = last(words, "--recompute-granularity") == "full"
    placeholders: tuple[tuple[Collection[str], list[str]], ...] = (
        (("--micro-batch-size",), ["--micro-batch-size", "1"]),
        (("--max-position-embeddings",), ["--max-position-embeddings", length] if length else []),
        (("--train-iters", "--train-samples"), ["--train-iters", "100"]),
        (("--lr",), ["--lr", "0.0001"]),
        (("--eval-interval",), ["--eval-interval", "1000"]),
        (("--eval-interval", "--eval-iters"), ["--eval-iters", "0"]),
        (("--tokenizer-type", "--vocab-file"), ["--tokenizer-type", "NullTokenizer"]),
        (_DATA, ["--mock-data"]),
        (("--recompute-method",), ["--recompute-method", "uniform"] if is_computed_again else []),
        (("--recompute-num-layers",), ["--recompute-num-layers", "1"] if is_computed_again else []),
        (("--save-interval",), ["--save-interval", "1000"] if "--save" in words_given else []),
    )
    return [
        word
        for names, placeholder in placeholders
        if not words_given.intersection(names)
        for word in placeholder
    ]


def short_run(flags: Sequence[str], steps: int, changed: Mapping[str, Any]) -> list[str]:
    """Return ``flags`` for a run of ``steps`` steps without evaluation, overridden by ``changed``.

    If a flag is given twice, Megatron takes the last.  Flags that Megatron misses are filled in.
    """
    words = words_of(flags)
    is_long = "--train-samples" in words or whole_number(words, "--train-iters", 0) >= steps
    length = [] if is_long else ["--train-iters", str(steps)]
    changed = {**changed, "--exit-interval": steps, "--eval-iters": 0, "--eval-interval": 1000}
    whole = [*flags, *length]
    return [*whole, *missing(whole), *(str(word) for change in changed.items() for word in change)]


def without(flags: Iterable[str], names: Mapping[str, int] = _FILES) -> Iterator[str]:
    """Yield ``flags`` without those named in ``names``, each of which has so many words after it.

    By default these are the flags that name files of the real run.
    """
    following = iter(flags)
    for flag in following:
        name, equals, _ = flag.partition("=")
        if name not in names:
            yield flag
        elif not equals:
            for _ in range(names[name]):
                next(following, None)
