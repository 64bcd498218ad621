"""The operations of a step are those that Megatron counts for the rate that it logs."""

from argparse import Namespace

import pytest

from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.model_description import model_operations

BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 512 --moe-router-topk 2 --disable-bias-linear"
LATENT = "--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --v-head-dim 96"
MODELS = {
    "dense": "",
    "gated, of grouped queries": "--swiglu --group-query-attention --num-query-groups 4 --kv-channels 96",
    "of windows": "--window-size 127,0",
    "experts": f"{EXPERTS} --moe-layer-freq 3 --moe-shared-expert-intermediate-size 256 --swiglu",
    "latent experts": f"{EXPERTS} --moe-latent-size 256 --squared-relu",
    "latent attention": f"{LATENT} --q-lora-rank 256",
    "latent keys alone": LATENT,
    "predicting": f"{EXPERTS} --mtp-num-layers 2 --swiglu",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "linear": "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --swiglu",
    "hybrid": f"--hybrid-layer-pattern M-*EM-ME --mamba-num-heads 32 {EXPERTS}",
    "hybrid, predicting": f"--hybrid-layer-pattern M-*EM-ME/*-/*- {EXPERTS} --position-embedding-type none",
}


@pytest.mark.parametrize("name", MODELS)
def test_as_megatron_counts(name: str) -> None:
    training = pytest.importorskip("megatron.training.training")
    job = described.read([*BASE.split(), *MODELS[name].split()], None).job
    given = vars(job.args)
    derived = {
        "padded_vocab_size": job.padded_vocabulary,
        "kv_channels": job.model.head_width,
        "ffn_hidden_size": job.model.mlp_width,
        "num_experts": given["num_experts"] or None,
        "mtp_num_layers": job.model.mtp_num_layers or None,
    }
    expected = training.num_floating_point_operations(Namespace(**{**given, **derived}), 32)
    assert model_operations(job, 32) == pytest.approx(expected)
