"""Every kind of layer as Megatron builds it small: its parameters, and the bytes that its forward keeps.

What only a GPU has is stood in for; see ``tests.support.hybrid_layers``.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from tests import support
from tests.support.training import train  # has to come before Megatron, and installs what it needs on a CPU

# isort: split
from megatron.core.tensor_parallel import random
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.stages import stage_parts
from megatron_pp_ext.job import model_config
from megatron_pp_ext.job.typed_job import Job
from tests.support.flags import arguments
from tests.support.kept_bytes import kept_bytes, share_storage
from tests.support.tiers import first


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
        patch.setattr(random, "_get_share_storage", lambda: share_storage, raising=False)
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


SIZES = (
    "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --vocab-size 512 "
    "--untie-embeddings-and-output-weights"
)
MAMBA = "--mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2"
HYBRID = (
    f"--spec tests.support.hybrid_layers stack --position-embedding-type none --disable-bias-linear {MAMBA} "
    f"{SIZES} --hybrid-layer-pattern"
)
ROUTED = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
GROUPED = HYBRID.replace(" stack ", f" grouped_stack --moe-grouped-gemm {ROUTED} ")
SHARED = "--moe-shared-expert-intermediate-size 40"
PREDICTING = f"{SIZES} --num-layers 2 --position-embedding-type none --mtp-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
BLOCKS = (
    f"{SIZES} --heterogeneous-layers-config-path {support.__path__[0]}/eight_blocks.json --swiglu "
    "--normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--position-embedding-type rope --use-rotary-position-embeddings --use-rope-scaling "
    "--rope-scaling-factor 8 --rotary-base 500000"
)

KINDS = {
    "Mamba-2": f"{HYBRID} *MM --bf16",
    "latent and shared experts": f"{GROUPED} EE- --squared-relu --moe-latent-size 16 {SHARED} "
    "--moe-shared-expert-gate",
    "two depths of prediction": f"{PREDICTING} 2",
    "experts one by one": f"{HYBRID} E- {ROUTED}",
    "gated experts": f"{GROUPED} EE- --swiglu",
    "clamped experts": f"{GROUPED} EE- --swiglu --no-bias-swiglu-fusion --activation-func-clamp-value 7",
    "squared ReLU in one kernel": f"{GROUPED} EE- --squared-relu --use-fused-weighted-squared-relu",
    "latent experts in bf16": f"{GROUPED} EE- --squared-relu --moe-latent-size 16 --bf16 "
    "--moe-router-dtype fp32",
    "balanced by biases": f"{GROUPED} EE- {SHARED} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias",
    "experts with biases": f"{GROUPED} EE-".replace("--disable-bias-linear ", ""),
    "experts behind a dense layer": f"{SIZES} --num-layers 3 {ROUTED} --moe-layer-freq [0,1,1] "
    "--disable-bias-linear",
    "gated, unfused": f"{HYBRID} *- --swiglu --no-bias-swiglu-fusion",
    "clamped": f"{HYBRID} *- --swiglu --no-bias-swiglu-fusion --activation-func-clamp-value 7",
    "squared ReLU": f"{HYBRID} *- --squared-relu",
    "prediction without biases": f"{PREDICTING} 2 --disable-bias-linear",
    "repeated prediction by a pattern": f"{HYBRID} M*-/M/M --mtp-use-repeated-layer",
}

RECOMPUTED = {
    "activation functions of experts": f"{GROUPED} EE- --swiglu {SHARED} {SELECTIVE} moe_act",
    "layers of experts": f"{GROUPED} EE- {SHARED} {SELECTIVE} moe",
    "shared experts": f"{GROUPED} EE- {SHARED} --moe-shared-expert-gate {SELECTIVE} shared_experts",
    "norms of experts": f"{GROUPED} EE- {SHARED} {SELECTIVE} layernorm",
    "norms, but not Mamba's": f"{HYBRID} M-M- {SELECTIVE} layernorm",
    "MLPs": f"{HYBRID} *- --swiglu {SELECTIVE} mlp",
    "hybrid layers": f"{HYBRID} M*- {FULL} uniform",
    "layers, but not prediction": f"{PREDICTING} 1 {FULL} block",
}


@pytest.mark.parametrize("flags", first(3, [pytest.param(flags, id=name) for name, flags in KINDS.items()]))
def test_a_kind_of_layer_is_as_megatron_builds_it(flags: str) -> None:
    """Its parameters exactly, its bytes without statistics of norms and the like; from flags and config."""
    found, of_config = built(flags)
    assert of_config.parameters == found.parameters
    assert of_config.kept == pytest.approx(found.kept, rel=0.03)
    assert counted(arguments(flags)) == of_config


@pytest.mark.parametrize(
    "flags", first(1, [pytest.param(flags, id=name) for name, flags in RECOMPUTED.items()])
)
def test_what_is_computed_again_is_not_kept(flags: str) -> None:
    found, of_config = built(flags)
    assert of_config.kept == pytest.approx(found.kept, rel=0.03)
    assert counted(arguments(flags)) == of_config


def test_an_unfused_quick_gate() -> None:
    """A CPU, where nothing is compiled, also keeps the sigmoid of each of 4 x 64 numbers a token."""
    found, of_config = built(f"{HYBRID} *- --quick-geglu")
    sigmoid = 4 * 128 * 4 * 64
    assert of_config.parameters == found.parameters
    assert of_config.kept + sigmoid == pytest.approx(found.kept, rel=0.03)


def test_layers_that_are_described_one_by_one() -> None:
    """A CPU, where no kernel computes such a norm, also keeps its result for each of 15 of them."""
    found, of_config = built(BLOCKS)
    assert of_config.parameters == found.parameters
    assert of_config.kept + 15 * 4 * 128 * 64 == pytest.approx(found.kept, rel=0.03)
    assert counted(arguments(BLOCKS)) == of_config
