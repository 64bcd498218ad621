"""Run Megatron's own training loop on forked ranks and look inside.

    runs = train(4, ["--pipeline-model-parallel-size", "4"])
    runs[-1].losses                               # one float a step, on the last pipeline rank

Initial weights go by global layer number and parameter name, not by rank, so that every layout of the same
model starts from the same numbers and losses can be compared across layouts.
"""

import functools
import hashlib
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import ranks  # has to come before Megatron: installs the stand-ins for torch.cuda

# isort: split
# Not used here: each rank would import these by itself, with seconds of other packages behind them.
import megatron.core.datasets.helpers
import megatron.core.models.mimo
import megatron.core.tokenizers.text.models  # noqa: F401
import pytest
import torch
from megatron.core import mpu
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.training import arguments, ft_integration, training
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.global_vars import get_tensorboard_writer

from megatron_pp_ext import cpu, pretrain_gpt
from megatron_pp_ext.cpu.flags import megatron_flags
from megatron_pp_ext.job import flag_effects
from megatron_pp_ext.megatron import hooks, patching, releases
from megatron_pp_ext.megatron.core.parameters import global_parameters
from tests.support import frozen

ranks.import_ahead(*ranks.ROOMS, "megatron")
patching.apply(hooks.launch_hooks(cpu=True))

MockGPTLowLevelDataset.size = 1000  # documents; to index the usual 100,000 takes a second a rank

_read_help_texts = ArgumentGroupFactory._get_field_docstrings
_help_texts: dict[type, dict[str, str]] = {}


def _known_help_texts(factory: ArgumentGroupFactory, configuration: type) -> dict[str, str]:
    if configuration not in _help_texts:
        _help_texts[configuration] = _read_help_texts(factory, configuration)
    return _help_texts[configuration]


# The parser reads the sources of all configurations, half a second on each rank: here once for all of them.
ArgumentGroupFactory._get_field_docstrings = _known_help_texts
MEGATRON_FLAGS = megatron_flags()
flag_effects.not_compiled()  # likewise: the tables of what each flag does
# It would parse all flags once more, for a package that is not there.
ft_integration.setup = lambda: None

# Before 0.18 the tokenizer adds a token to mark the end of a document: so the model is the same on all.
TOKENS = 63 if releases.megatron_release() < releases.CORE_0_18 else 64

TINY = shlex.split(
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
    f"--lr 0.01 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {TOKENS} "
    "--make-vocab-size-divisible-by 1 --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--distributed-timeout-minutes 5"
)

# Before 0.18 Muon has a function of its own.
OPTIMIZER_MAKERS = [
    name for name in ("get_megatron_optimizer", "get_megatron_muon_optimizer") if hasattr(training, name)
]

ONE_OF_TWO = {"--step-batch-size-schedule": "--global-batch-size", "--train-samples": "--train-iters"}
"""Flags beside which Megatron refuses one of those above."""


@dataclass
class Run:
    """One rank's results of a training run."""

    losses: list[float] = field(default_factory=list)  # a step; on ranks without the loss: empty
    grad_norms: list[float | None] = field(default_factory=list)  # a step; None: skipped, fp16 overflowed
    validation: list[float] = field(default_factory=list)  # an evaluation
    logged: list[dict[str, str]] = field(default_factory=list)  # a step's losses by name; on the last rank
    grabbed: Any = None  # what ``grab`` returned


Grab = Callable[[list[torch.nn.Module]], Any]
Disturb = Callable[[list[torch.nn.Module]], None]


def train(
    world_size: int,
    flags: Sequence[str] = (),
    *,
    initialize: Callable[[list[torch.nn.Module]], None] | None = None,
    grab: Grab | None = None,
    disturb: Disturb | None = None,
    timeout: float = ranks.HANG_SECONDS,
) -> list[Run]:
    """Pre-train the tiny GPT with ``flags`` after its own flags, and return each rank's results.

    It trains on mock data unless ``flags`` has a --data-path, or one for each part.

    ``initialize(chunks)`` sets the weights before the optimizer is made and a checkpoint is loaded; by
    default they go by layer. ``grab(chunks)`` is called once, on every rank, after the gradients of the first
    step are final and before the optimizer uses them; what it returns comes back in ``grabbed``.
    ``disturb(chunks)`` may change the final gradients of every step, and comes after ``grab``.

    Beside Megatron's flags there is ``frozen.FLAG``.
    Skips the test on an older Megatron that lacks one of ``flags``.
    """
    for flag in frozen.without_flag(flags)[0]:
        if flag.startswith("--") and not has_flag(flag):
            pytest.skip(f"megatron-core {releases.megatron_version()} has no {flag}")
    data = [] if any(flag.endswith("data-path") for flag in flags) else ["--mock-data"]
    tiny = [*TINY]
    for flag, other in ONE_OF_TWO.items():
        if flag in flags:
            del tiny[(at := tiny.index(other)) : at + 2]
    argv = cpu.with_cpu_flags([*tiny, *data, *flags], MEGATRON_FLAGS)
    _parser(arguments.add_megatron_arguments)
    hooks = (initialize or initialize_by_layer, grab, disturb)
    return ranks.run_ranks(_train, world_size, argv, *hooks, timeout=timeout)


@functools.cache
def has_flag(flag: str) -> bool:
    """Whether this Megatron has ``flag``; on the newest release yes, since there its absence is an error."""
    return releases.megatron_release() >= releases.NEWEST or flag in megatron_flags()


def since(release: releases.Number, why: str) -> pytest.MarkDecorator:
    """A mark for tests that older releases of Megatron cannot pass, with the reason ``why``."""
    return pytest.mark.skipif(releases.megatron_release() < release, reason=why)


@functools.cache
def _parser(add: Callable[[ArgumentParser], ArgumentParser]) -> ArgumentParser:
    """Megatron's parser, which takes a rank longer to build than to use."""
    return add(ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))


def _train(
    rank: int, argv: list[str], initialize: Callable, grab: Grab | None, disturb: Disturb | None = None
) -> Run:
    run = Run()
    argv, frozen_kind = frozen.without_flag(argv)
    frozen.freeze_models(frozen_kind)
    sys.argv = ["pretrain_gpt.py", *argv]
    add = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = lambda parser: _parser(add)
    cpu.fork_checkpoint_writers(argv)
    for name, watch in (
        *(
            (name, functools.partial(_watch_optimizer, run, initialize, grab, disturb))
            for name in OPTIMIZER_MAKERS
        ),
        ("train_step", functools.partial(_watch_train_step, run)),
        ("evaluate", functools.partial(_watch_evaluate, run)),
        ("print_rank_last", functools.partial(_watch_log, run)),
    ):
        setattr(training, name, watch(getattr(training, name)))
    try:
        pretrain_gpt.main()
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise
    if writer := get_tensorboard_writer():
        writer.close()  # a forked rank ends without what Python does at its exit
    return run


def _watch_optimizer(
    run: Run, initialize: Callable, grab: Grab | None, disturb: Disturb | None, make: Callable
) -> Callable:
    """Set the weights before the optimizer is made, and look at the gradients before its first step."""

    def watched(config: Any, chunks: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        initialize(chunks)
        optimizer = make(config, chunks, *args, **kwargs)
        step = optimizer.step

        def disturbed_step() -> Any:
            if disturb:
                disturb(chunks)
            return step()

        def first_step() -> Any:
            optimizer.step = disturbed_step
            if grab:
                run.grabbed = grab(chunks)
            return disturbed_step()

        optimizer.step = first_step
        return optimizer

    return watched


def _watch_train_step(run: Run, step: Callable) -> Callable:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if "lm loss" in result[0]:
            run.losses.append(result[0]["lm loss"].item())
        run.grad_norms.append(result[5])
        return result

    return watched


def _watch_evaluate(run: Run, evaluate: Callable) -> Callable:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if "lm loss" in (result[0] or {}):
            run.validation.append(result[0]["lm loss"].item())
        return result

    return watched


def _watch_log(run: Run, log: Callable) -> Callable:
    """Keep the losses that Megatron prints after a step, in its own rounding."""

    def watched(text: str) -> None:
        losses = dict(re.findall(r"(\w[\w ]*loss): (\S+)", text))
        if losses and mpu.is_pipeline_last_stage(ignore_virtual=True):
            run.logged.append(losses)
        log(text)

    return watched


def initialize_by_layer(chunks: list[torch.nn.Module]) -> None:
    """Set every parameter of these model chunks to numbers that depend on its global name alone."""
    with torch.no_grad():
        for name, parameter in global_parameters(chunks):
            parameter.copy_(_shard(_full(name, parameter), parameter))


def _full(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Numbers for the whole tensor, of which ``parameter`` may be one tensor-parallel part."""
    shape = list(parameter.shape)
    if rows := _rows_of_whole(parameter):
        shape[0] = rows[1]
    elif _is_cut(parameter):
        shape[parameter.partition_dim] *= mpu.get_tensor_model_parallel_world_size()
    numbers = 0.05 * normal(name, shape)
    is_norm_scale = len(shape) == 1 and name.endswith("weight")
    return numbers + 1 if is_norm_scale else numbers


def normal(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Normally distributed numbers, drawn by ``name`` alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _shard(full: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Cut out the part of this rank. With a stride s, a part is s pieces, as Megatron deals them out."""
    if rows := _rows_of_whole(parameter):
        return full[rows[0] : rows[0] + len(parameter)]
    if not _is_cut(parameter):
        return full
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    pieces = full.chunk(size * parameter.partition_stride, dim=parameter.partition_dim)
    return torch.cat(pieces[rank::size], dim=parameter.partition_dim)


def _rows_of_whole(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """The first row and the number of all rows, where all pipeline ranks share the vocabulary."""
    return getattr(parameter, "rows_of_whole", None)


def _is_cut(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars in the event files of ``folder``, by tag and iteration."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = events.EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in file.Scalars(tag)} for tag in file.Tags()["scalars"]}
