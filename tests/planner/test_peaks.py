"""Bytes of activations in flight, against simulations and against peaks that were measured.

The flags are those of tests/functional_tests/test_cases at commit d98e8a64d, or of the commit that recorded
the peak, without those that change no memory; the peaks are ``mem-max-allocated-bytes`` of golden_values_dev.
The GPUs of release tests are not published: ``benchmarks.planner.found_peaks`` says how they are found.
"""

from itertools import product

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.described import read
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.programs import Prepared, program
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import rounding


def parts(stages, **more):
    times = {"forward_seconds": 1.0, "input_gradient_seconds": 1.1, "weight_gradient_seconds": 0.7}
    return [
        Part(**times, after_forward=10.0 + stage, after_input_gradient=7.0 - stage / 40, **more)
        for stage in range(stages)
    ]


@pytest.mark.parametrize("again", [{}, {"workspace": 6.0, "workspace_in_whole": 9.0}])
@pytest.mark.parametrize("name", catalog.NAMES)
def test_peaks_are_the_simulations(name, again):
    schedule = catalog.build(name, 4, 10)
    stages = parts(schedule.placement.stages, **again)
    timeline = simulate(schedule, Costs(tuple(part.costs() for part in stages)))
    assert Prepared(schedule).in_flight.peaks(stages) == pytest.approx(timeline.peak_activations)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_more_microbatches_never_need_less(name):
    """The search looks at 2p microbatches first: what does not fit then, does not fit with more."""
    chunks = catalog.entry(name).chunks
    for ranks, few in product((2, 3, 8), (2, 3)):
        before = few * ranks
        for after in (before + 1, 2 * before + 1):
            stages = parts(ranks * chunks, workspace=1.0, workspace_in_whole=4.0)
            less, more = (
                program(name, ranks, count, chunks).in_flight.peaks(stages) for count in (before, after)
            )
            rounded = rounding.relative(3 * chunks * after, rounding.FLOAT64)
            assert max(less) <= max(more) * (1 + rounded)


def test_a_whole_backward_computes_one_group_again():
    schedule = catalog.build("1f1b", 2, 4)
    plain, again = parts(2), parts(2, workspace_in_whole=4.0)
    assert Prepared(schedule).in_flight.peaks(again) == pytest.approx(
        [peak + 4 for peak in Prepared(schedule).in_flight.peaks(plain)]
    )


def test_a_pair_keeps_one_layer_more_than_what_was_before_it():
    """Interleaved pairs begin with one forward more, in the place of the one that runs with its backward."""
    order = catalog.build("interleaved", 2, 8, 2, paired=True)
    plain = catalog.build("interleaved", 2, 8, 2)
    stages = [Part(1, 1, 1, 1.0, 1.0, 1.0, after_forward=10.0, of_layer=2.0)] * 4
    kept = Prepared(plain).in_flight.peaks(stages)
    assert Prepared(order).in_flight.peaks(stages) == pytest.approx([peak + 2 for peak in kept])


def test_an_input_gradient_keeps_what_its_forward_did_not():
    stages = [Part(1, 1, 1, 1.0, 1.0, 1.0, after_forward=1.0, after_input_gradient=5.0, workspace=2.0)] * 2
    # zb-h1's last rank: one forward, and at most two microbatches between I and W.
    peaks = Prepared(catalog.build("zb-h1", 2, 4)).in_flight.peaks(stages)
    assert max(peaks) >= 7


@pytest.mark.parametrize("is_paired", [False, True])
def test_without_a_pipeline_there_is_one_microbatch_in_flight(is_paired):
    """In a pair one half keeps by layer what the other frees; both halves and the ends of a step count."""
    order = program("interleaved", 1, 3, 1, options=(Pairs(),) if is_paired else ())
    assert order.in_flight.peaks(parts(1, workspace_in_whole=4.0)) == pytest.approx([10 + 4])
    assert len(order.timer.schedule.paired) == (2 if is_paired else 0)
    assert order.timer.spans(Costs((parts(1)[0].costs(),), pair=0.75))[0].end == pytest.approx(
        2.8 * (1 + 2 * 0.75) if is_paired else 3 * 2.8
    )


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
