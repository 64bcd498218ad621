"""The meaning of a line of flags, read as a job reads it but without one."""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

# isort: split
from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_pp_ext import cpu
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.job.flag_table import add_flags
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.start_up import estimate
from megatron_pp_ext.megatron.trainer.validation import read_flags
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.model_description import derive_arguments
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear
from tests.support.ranks import run_ranks
from tests.support.training import TINY

PP4 = "--pipeline-model-parallel-size 4"


def arguments(flags: str) -> Namespace:
    """Return Megatron's arguments of the tiny GPT with ``flags``, parsed and not yet validated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *cpu.with_cpu_flags([*TINY, *flags.split()])])
        args: Namespace = megatron_arguments.parse_args()
    return args


def read_by_megatron(words: Sequence[str]) -> Namespace:
    """Read ``words`` with Megatron's own parser and this package's flags."""
    parser = megatron_arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False, add_help=False))
    if not any(action.dest == "pipeline_schedule" for action in parser._actions):
        add_flags(parser)  # they are there already where this package's hooks are installed
    args = parser.parse_args(list(words))
    derive_arguments(args)
    return args


def read_by_commands(words: Sequence[str]) -> RequestedJob:
    """Read ``words`` as a command does, without Megatron."""
    return described.read(words, None).counted()


def read(monkeypatch: pytest.MonkeyPatch, flags: str):
    """Return the pipeline that ``flags`` request on four ranks; None where they request none."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    return requested_by(arguments(flags))


def requested_by(args: Namespace) -> Pipeline | None:
    """Return the pipeline that ``args`` request; None where they request none."""
    _, pipeline = read_flags(args)
    return pipeline


def estimated(flags: str) -> Request:
    """Return the request of the tiny GPT with ``flags`` on four ranks as mpp estimate reads it."""
    return for_world(read_by_commands(cpu.with_cpu_flags([*TINY, *flags.split()])), 4)


def validated(
    flags: Sequence[str], world_size: int, variables: Mapping[str, str] | None = None
) -> tuple[Namespace, Request | None]:
    """Return Megatron's validated arguments of a job on a CPU, and the request that this package reads there.

    Megatron's own parser and validation run in a process of their own; this package's hooks have to be
    installed in this one.  With ``variables``, the environment of a printed command, Megatron asserts what
    it asserts on a GPU before Blackwell, and the tests' own variables do not help.
    """
    ((args, request),) = run_ranks(_validate, 1, cpu.with_cpu_flags(flags), world_size, variables)
    return args, request


def pasted(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the flags of a printed torchrun command, as a shell reads it."""
    words = shlex.split(command.replace("\\\n", ""))  # a shell joins lines there
    variables = dict(word.split("=", 1) for word in words[: words.index("torchrun")])
    return variables, words[words.index("megatron_pp_ext.pretrain_gpt") + 1 :]


def _validate(
    rank: int, flags: list[str], world_size: int, variables: Mapping[str, str] | None
) -> tuple[Namespace, Request | None]:
    with pytest.MonkeyPatch.context() as patch:
        if variables is not None:
            patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
            patch.setattr(megatron_arguments, "get_device_arch_version", lambda: 9)
            patch.setattr("torch.cuda.get_device_capability", lambda *device: (9, 0))
            for name, value in variables.items():
                patch.setenv(name, value)
        patch.setattr("sys.argv", ["pretrain_gpt.py", *flags])
        patch.setenv("WORLD_SIZE", str(world_size))
        args = megatron_arguments.parse_args()
        megatron_arguments.validate_args(args)
    pipeline = requested.pipeline()
    return args, pipeline and pipeline.request


def configured(lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return stock Megatron's config of a model on a GPU, for each of the command lines.

    It is the content of ``TransformerConfig`` as far as it is numbers, texts and lists.
    """
    ((configs),) = run_ranks(_configure, 1, [cpu.with_cpu_flags(line) for line in lines])
    return configs


def _configure(rank: int, lines: list[list[str]]) -> list[dict[str, Any]]:
    configs = []
    validate = megatron_arguments.validate_args
    for line in lines:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "1")
            patch.setattr("torch.cuda.get_device_capability", lambda *device: (9, 0))
            patch.setattr("sys.argv", ["pretrain_gpt.py", *line])
            args = megatron_arguments.parse_args()
            # What this package refuses without Transformer Engine is not asked here.
            getattr(validate, "__wrapped__", validate)(args)
            config = vars(core_transformer_config_from_args(args))
        plain = bool, int, float, str, list, tuple, type(None)
        configs.append({name: value for name, value in config.items() if isinstance(value, plain)})
    return configs


def assert_refused(monkeypatch: pytest.MonkeyPatch, flags: str, message: str) -> None:
    """``flags`` are refused by an error of one line that matches ``message``."""
    with pytest.raises(ValueError, match=message) as error:
        read(monkeypatch, flags)
    assert "\n" not in str(error.value)


def estimated_costs(flags: str, stages: int) -> Costs:
    """Return the costs that are estimated for the tiny GPT with ``flags``, cut into ``stages``."""
    return estimate(RequestedJob.of_args(arguments(flags))).of(linear(stages))
