"""Estimates against peaks of the last rank that Megatron-LM's functional tests record.

The flags are those of tests/functional_tests/test_cases at commit d98e8a64d, or of the commit that recorded
the peak, without those that change no memory; the peaks are ``mem-max-allocated-bytes`` of golden_values_dev.
The GPUs of release tests are not published: ``benchmarks.planner.found_peaks`` says how they are found.
"""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.described import read
from megatron_pp_ext.planner.step.estimate import estimate_request

DISTRIBUTED = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
PLAIN = "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
GROUPED = "--group-query-attention --num-query-groups 8 "
SMALL = (
    "--bf16 --num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 "
    "--global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 "
)
DENSE_15B = (
    f"{DISTRIBUTED}{PLAIN}{GROUPED}--tensor-model-parallel-size 8 --sequence-parallel --disable-bias-linear "
    "--micro-batch-size 4 --global-batch-size 384 --position-embedding-type rope --squared-relu "
    "--num-layers 32 --hidden-size 6144 --num-attention-heads 48 --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 256000"
)
DENSE_7B = (
    f"{DISTRIBUTED}{GROUPED}--untie-embeddings-and-output-weights --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --micro-batch-size 1 --global-batch-size 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 131073 --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --no-gradient-accumulation-fusion"
)
MIXTRAL = (
    f"{DISTRIBUTED}{PLAIN}{GROUPED}--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1 --sequence-parallel "
    "--disable-bias-linear --micro-batch-size 1 --global-batch-size 256 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 "
    "--expert-model-parallel-size 8 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
DEEPSEEK = (
    f"{DISTRIBUTED}{PLAIN}--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
    "--disable-bias-linear --global-batch-size 512 --cross-entropy-loss-fusion --seq-length 4096 "
    "--num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 "
    "--max-position-embeddings 4096 --position-embedding-type rope --vocab-size 256000 "
    "--make-vocab-size-divisible-by 3232 --normalization RMSNorm --swiglu --multi-latent-attention "
    "--mtp-num-layers 1 --qk-layernorm --num-experts 64 --moe-layer-freq ([0]*3+[1]*11) "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-grouped-gemm "
    "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
)
ON_H100 = (
    "--micro-batch-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 16 "
    "--pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL"
)
ON_GB200 = (
    "--micro-batch-size 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-layout Et*7|t*7mL --cross-entropy-fusion-impl"
)


@pytest.mark.parametrize(
    ("flags", "gpu", "gpus", "measured"),
    [
        pytest.param(DENSE_15B, "h100", 256, 28160194560, id="gpt3_15b_8t_release"),
        pytest.param(DENSE_7B, "h100", 8, 60720852992, id="gpt3_7b_tp1_pp4_memory_speed"),
        pytest.param(MIXTRAL, "h100", 64, 35505844224, id="mixtral_8x7b_tp1pp4ep8vpp8_release"),
        pytest.param(f"{DEEPSEEK}{ON_H100}", "h100", 64, 51804901376, id="deepseekv3_proxy, H100"),
        pytest.param(f"{DEEPSEEK}{ON_GB200} te", "gb200", 32, 100882341888, id="deepseekv3_proxy, GB200"),
        pytest.param(f"{DEEPSEEK}{ON_GB200} native", "gb200", 32, 121791733760, id="..., compiled loss"),
        pytest.param(
            f"{SMALL}--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--no-gradient-accumulation-fusion",
            "h100",
            8,
            2561334272,
            id="uniform_full_recompute",
        ),
        pytest.param(
            f"{SMALL}--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
            "h100",
            8,
            1894918656,
            id="defer_embedding_wgrad_compute",
        ),
    ],
)
def test_peaks_of_the_last_rank(flags: str, gpu: str, gpus: int, measured: float) -> None:
    """Within 4% of what PyTorch's allocator gave out, without what the driver and communicators reserve."""
    job = read(flags.split(), None).counted()
    last = estimate_request(job, system.read(gpu), for_world(job, gpus)).ranks[-1]
    assert last.total - last.reserved == pytest.approx(measured, rel=0.04)
