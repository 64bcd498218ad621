"""Recipes that NVIDIA publishes, pasted after --: each gives an estimate, or the reason why there is none.

The flags are a selection: those that sizes, parallelism and refusals follow from.  They are of Megatron-LM's
examples, https://github.com/NVIDIA/Megatron-LM (d98e8a6), and of Megatron-MoE-ModelZoo's benchmarks,
https://github.com/yanring/Megatron-MoE-ModelZoo (e865051).
"""

import json
import socket

import pytest

from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.job.typed_job import Job

GATED = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16"
DROPLESS = (
    "--moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-grouped-gemm --moe-router-dtype fp32"
)
UNTIED = "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0"
COMMON = (
    f"{GATED} {UNTIED} --use-distributed-optimizer --use-mcore-models --use-flash-attn --sequence-parallel"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--rotary-scaling-factor 40 --qk-layernorm"
)
QWEN3 = "--qk-layernorm --group-query-attention --num-query-groups 4 --kv-channels 128 --num-experts 128"
SIZES = "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1"

ESTIMATED = {
    "Megatron-LM llama3-8b fp8": (
        f"{COMMON} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 "
        "--max-position-embeddings 8192 --rotary-base 1000000 --rotary-percent 1.0 --init-method-std 0.0134 "
        "--attention-backend fused --apply-layernorm-1p --micro-batch-size 1 --global-batch-size 128 "
        "--train-samples 1953125000 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --grad-reduce-in-bf16 "
        "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2",
        1,
    ),
    "Megatron-LM mixtral-8x7b": (
        f"{COMMON} "
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {SIZES} "
        "--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding "
        f"--rotary-base 1000000 --num-experts 8 --moe-router-topk 2 {DROPLESS} --moe-aux-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type aux_loss --overlap-param-gather --overlap-grad-reduce "
        "--global-batch-size 256 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--vocab-size 32000",
        32,
    ),
    "ModelZoo qwen3-235b-a22b": (
        f"{COMMON} {QWEN3} "
        f"--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
        f"{SIZES} --moe-ffn-hidden-size 1536 --moe-router-topk 8 {DROPLESS} --moe-router-fusion "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 "
        "--num-layers-per-virtual-pipeline-stage 3 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --expert-tensor-parallel-size 1 --global-batch-size 256 "
        "--moe-token-dispatcher-type flex --vocab-size 151936",
        256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATED)
def test_a_recipe_is_estimated_on_the_fewest_gpus_that_hold_it(name, mpp, tmp_path):
    flags, gpus = ESTIMATED[name]
    file = tmp_path / "estimate.json"
    result = mpp("estimate", "--json", file, "--", *flags.split())
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["gpus"] == gpus
    experts = "--expert-model-parallel-size" in flags
    assert experts == (f"on {gpus} GPUs, the fewest that share experts" in result.output)


OF_A_NAME = [
    (
        "deepseek-v3",
        "--pipeline-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --micro-batch-size 1 "
        "--global-batch-size 8192 --recompute-granularity selective --recompute-modules mla_up_proj mlp "
        "--pipeline-model-parallel-layout Et|(tt|)*30mL --fp8-format hybrid --moe-token-dispatcher-type flex "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --mtp-num-layers 1",
        512,
    ),
    (
        "qwen3-next-80b",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 256 "
        "--expert-model-parallel-size 32 --recompute-granularity selective "
        "--recompute-modules moe_act shared_experts layernorm --moe-router-force-load-balancing",
        128,
    ),
    ("nemotron-3-nano", "--expert-model-parallel-size 8 --global-batch-size 256", 8),
    (
        "gpt-oss-120b",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 8 --global-batch-size 256",
        16,
    ),
]


@pytest.mark.parametrize(("name", "flags", "gpus"), OF_A_NAME)
def test_a_named_model_takes_the_sizes_of_a_recipe(name, flags, gpus, mpp, tmp_path):
    file = tmp_path / "estimate.json"
    result = mpp("estimate", "--model", name, "--json", file, "--", *flags.split())
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["gpus"] == gpus


def test_other_numbers_of_gpus_are_taken_as_they_are_given(mpp):
    flags, gpus = ESTIMATED["Megatron-LM mixtral-8x7b"]
    result = mpp("estimate", "--world-size", 2 * gpus, "--", *flags.split())
    assert f"on {2 * gpus} x h100, 16 data-parallel" in result.output
    assert "the fewest" not in result.output


def test_experts_may_need_more_gpus_than_one_copy_of_the_model():
    for tensor, pipeline, experts, world in ((1, 4, 8, 32), (2, 8, 32, 256), (8, 2, 4, 16), (6, 2, 4, 24)):
        job = Job().changed(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=1,
        )
        assert smallest_world(job) == world


def said(result) -> str:
    """The last line, which refuses; the installed Megatron is asked after the estimate."""
    assert result.exit_code == 2
    return result.output.strip().splitlines()[-1]


REFUSED = {
    "Megatron-LM gpt3-175b, whose tokenizer has no type": (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 --fp16 "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file v.json "
        "--merge-file m.txt",
        "without the size of the vocabulary",
    ),
    "ModelZoo deepseek-v3 of a later Megatron": (
        f"{COMMON} {LATENT} --num-layers 61 --hidden-size 7168 --num-attention-heads 128 {SIZES} "
        "--vocab-size 129280 --pipeline-model-parallel-size 16 --num-experts 256 "
        "--moe-router-gate-of-tomorrow",
        "--moe-router-gate-of-tomorrow is none of Megatron's: leave it out if it is a training script's own",
    ),
    "ModelZoo qwen3-next": (
        f"{COMMON} --num-layers 48 --hidden-size 2048 --num-attention-heads 16 {SIZES} --vocab-size 151936 "
        "--no-weight-decay-cond-type qwen3_next --linear-attention-type gated_delta_net",
        "argument --no-weight-decay-cond-type: invalid choice: 'qwen3_next'",
    ),
    "Megatron-LM kimi-k2 of an earlier Megatron": (
        f"{COMMON} --num-layers 8 --hidden-size 7168 --num-attention-heads 64 {SIZES} --vocab-size 163840 "
        "--num-experts 8 --moe-layer-recompute",
        "--recompute-granularity selective --recompute-modules moe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_cannot_be_estimated_is_refused_by_the_reason(name, mpp):
    flags, reason = REFUSED[name]
    result = mpp("estimate", "--", *flags.split())
    assert reason in said(result)


TOKENIZER = (
    f"--num-layers 8 --hidden-size 512 --num-attention-heads 8 {SIZES} --tokenizer-type HuggingFaceTokenizer"
)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("command", ["estimate", "search --gpus 8 --global-batch-size 8"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-235B-A22B", "/nowhere/tokenizer"])
def test_a_tokenizer_that_is_not_here_is_not_asked_for(model, command, mpp, offline):
    result = mpp(*command.split(), "--", *TOKENIZER.split(), "--tokenizer-model", model)
    assert (
        f"--tokenizer-model {model} is no folder here, and would be downloaded for the size of its "
        "vocabulary: give --vocab-size"
    ) in said(result)


def test_a_tokenizer_without_its_folder_is_named_by_its_type(mpp, offline):
    result = mpp("estimate", "--", *TOKENIZER.split())
    assert (
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, the folder whose vocabulary would be "
        "counted: give it, or --vocab-size"
    ) in said(result)


WORDS = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "<s>"}]}
PIECES = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}


@pytest.mark.parametrize(
    ("files", "rows"),
    [
        ({"tokenizer.json": WORDS, "config.json": {"vocab_size": 640}}, 3),
        ({"tokenizer.json": PIECES}, 3),
        ({"config.json": {"vocab_size": 640}}, 640),
        ({"config.json": {"text_config": {"vocab_size": 320}}}, 320),
    ],
)
def test_a_tokenizer_in_a_folder_tells_its_size(files, rows, mpp, tmp_path, offline):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    printed = []
    for more in (["--tokenizer-model", str(tmp_path)], ["--vocab-size", str(rows)]):
        out = tmp_path / "estimate.json"
        assert mpp("estimate", "--json", out, "--", *TOKENIZER.split(), *more).exit_code == 0
        printed.append(json.loads(out.read_text())["ranks"])
    assert printed[0] == printed[1]


@pytest.mark.parametrize("files", [{}, {"config.json": {}}, {"tokenizer.json": {"model": {}}}])
def test_a_folder_without_the_size_is_told_so(files, mpp, tmp_path, offline):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    result = mpp("estimate", "--", *TOKENIZER.split(), "--tokenizer-model", tmp_path)
    assert "has neither a tokenizer.json nor a config.json with its vocabulary: give" in said(result)
