"""Whether the installed Megatron starts a job: its own parser, validation and config are asked.

    python -m megatron_pp_ext.megatron.trainer.acceptance

reads questions from stdin and writes answers to stdout, each as JSON in one line (``job.ask_megatron``).  It
needs no GPU: Megatron sees a Hopper with a new Transformer Engine, since the machine that trains is another.
This package's hooks are not installed: a question has the flags that it adds, in place of its own.
"""

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NoReturn
from unittest import mock

from megatron_pp_ext import cpu
from megatron_pp_ext.job import flag_table
from megatron_pp_ext.setting_error import failed_check

if __name__ == "__main__":
    cpu.install()  # before anything imports Megatron

# isort: split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import moe_utils
from megatron.training import arguments

_HOPPER = 9
"""The compute capability that Megatron sees: its checks demand the most of GPUs before Blackwell."""

_UNKNOWN = "unrecognized arguments: "
"""What argparse puts before the words that a parser does not know."""


class _Unparsed(ValueError):
    """The error of Megatron's parser."""


def answer(
    flags: Sequence[str], world_size: int, variables: Mapping[str, str], shown: Mapping[str, Any]
) -> dict[str, Any]:
    """Return Megatron's answer to a job of ``flags`` on ``world_size`` GPUs under such ``variables``.

    The arguments ``shown`` take the place of others after the validation, before the config is made.
    ``refusal`` is its error in one line, empty where it starts; ``unknown`` are words that are none of its
    flags.  ``failure`` is the error where this machine lacks what the checks need, such as a package or a
    file, so that nobody knows.  ``differs`` has the arguments that it reads as another value than
    ``flag_table``, by their names.
    """
    said: dict[str, Any] = {"refusal": "", "failure": "", "unknown": [], "differs": {}}
    with _on_a_gpu(), _environment(world_size, variables), _quiet():
        try:
            args = _parsed(flags)
            said["differs"] = _differing(args, flag_table.parse(flags, {})[0])
            # What this package adds to the validation, where its hooks are installed, is not asked.
            getattr(arguments.validate_args, "__wrapped__", arguments.validate_args)(args)
            vars(args).update(shown)
            arguments.core_transformer_config_from_args(args)
            _check_optimizer(args)
        except _Unparsed as error:
            said["refusal"] = str(error)
            if str(error).startswith(_UNKNOWN):
                said["unknown"] = str(error).removeprefix(_UNKNOWN).split()
        except Exception as error:
            if _is_of_machine(error):
                said["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            else:
                said["refusal"] = failed_check(error)
    return said


def _parsed(flags: Sequence[str]) -> Namespace:
    """Return the arguments of Megatron's own parser; ``_Unparsed`` for what it does not accept."""

    def error(parser: ArgumentParser, message: str) -> NoReturn:
        raise _Unparsed(" ".join(message.split()))

    words = ["train.py", *flags]
    with mock.patch.object(sys, "argv", words), mock.patch.object(ArgumentParser, "error", error):
        args: Namespace = arguments.parse_args()
    return args


def _check_optimizer(args: Namespace) -> None:
    """Make the optimizer's config as Megatron does, which checks it.

    The last check imports an optimizer, which this machine need not have.
    """
    names = {setting.name for setting in fields(OptimizerConfig)}
    try:
        OptimizerConfig(**{name: value for name, value in vars(args).items() if name in names})
    except Exception as error:
        if not _is_of_machine(error):
            raise


def _differing(theirs: Namespace, ours: Namespace) -> dict[str, Any]:
    """Return the arguments of Megatron's that ``ours`` has with another value."""
    values = {name: _plain(value) for name, value in vars(theirs).items() if hasattr(ours, name)}
    return {name: value for name, value in values.items() if value != _plain(getattr(ours, name))}


def _plain(value: Any) -> Any:
    """Return ``value`` as a text, a number or a list of these; pairs, which are texts here, as a text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


def _is_of_machine(error: BaseException | None) -> bool:
    """Whether ``error``, or what it comes from, is about a package or a file that this machine lacks."""
    while error is not None:
        if isinstance(error, ImportError | OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _on_a_gpu() -> Iterator[None]:
    """Let Megatron find a GPU, Transformer Engine and its kernels, as far as its checks look for them."""
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        for module in (arguments, transformer_config):
            stack.enter_context(patch(module, "is_te_min_version", lambda *version, **how: True))
        stack.enter_context(patch(arguments, "get_device_arch_version", lambda: _HOPPER))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *device: (_HOPPER, 0)))
        for module in (rope_utils, moe_utils):
            absent = [name for name, value in vars(module).items() if "fused_" in name and value is None]
            for name in absent:
                stack.enter_context(patch(module, name, object()))
        yield


@contextlib.contextmanager
def _environment(world_size: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Let Megatron find the ``variables`` of a job, and none of another."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
            os.environ.pop(name, None)
        os.environ.update({"WORLD_SIZE": str(world_size), **variables})
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def main() -> None:
    """Answer every question of stdin."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
