"""A model that Megatron builds on one CPU rank: how many parameters it has, and what its forward keeps.

Beside it what the costs of layers say of the same, from the model's own config.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.training import train  # has to come before Megatron, and installs what it needs on a CPU

# isort: split
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_pp_ext.job import model_config
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.model_parts import model_parts
from megatron_pp_ext.planner.step.stage_parts import stage_parts
from tests.support.kept_bytes import kept_bytes


class Built(NamedTuple):
    """The number of a model's parameters, and the bytes that a forward of one microbatch keeps."""

    parameters: float
    kept: float


@cache
def built(flags: str) -> tuple[Built, Built]:
    """Return the tiny GPT with ``flags`` as Megatron's layers make it on one rank, and as costs have it."""
    with pytest.MonkeyPatch.context() as patch:
        # Megatron's check of --moe-grouped-gemm asks for a device.
        patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        (run,) = train(1, [*flags.split(), "--train-iters", "1"], grab=_measured)
    return run.grabbed


def counted(args: Namespace) -> Built:
    """Return the model of ``args`` as the costs of layers have it on one rank."""
    job = Job.of(args)
    model = model_parts(job, vocabulary=args.padded_vocab_size or args.vocab_size)
    (whole,) = stage_parts(job, model, [len(model.layers)])
    return Built(whole.parameters + whole.expert_parameters, whole.after_forward)


def _measured(chunks: Sequence[torch.nn.Module]) -> tuple[Built, Built]:
    (chunk,) = chunks
    args = get_args()
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.padded_vocab_size, shape)
    positions = torch.arange(args.seq_length).expand(shape)
    hidden = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)[None, None]
    parameters = list(chunk.parameters())
    kept = kept_bytes(parameters, lambda: chunk(tokens, positions, hidden, labels=tokens))
    found = Built(sum(one.numel() for one in parameters), kept)
    return found, counted(_of_config(get_model_config(chunk), args))


def _of_config(config: Any, args: Namespace) -> Namespace:
    """Return the arguments that ``config`` has, with those that a config lacks."""
    beside = (
        "seq_length micro_batch_size padded_vocab_size position_embedding_type transformer_impl "
        "untie_embeddings_and_output_weights hybrid_layer_pattern max_position_embeddings"
    )
    return model_config.arguments(config, **{name: getattr(args, name) for name in beside.split()})
