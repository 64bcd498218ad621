"""Estimated costs: operations against a count by hand, bytes against those of a training run."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.tokenizers.utils import build_tokenizer

from megatron_pp_ext.costs.stages import bytes_between_stages
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.megatron import start_up
from megatron_pp_ext.megatron.start_up import estimate
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.placement import linear, v
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import traced
from tests.support.flags import PP4, arguments, assert_refused, read
from tests.support.flags import estimated_costs as costs
from tests.support.tiers import first

TOKENS = SEQUENCE = HIDDEN = 32
VOCABULARY = 64
ATTENTION = 4 * HIDDEN**2
SCORES = 4 * TOKENS * SEQUENCE * HIDDEN
ROUTER = 2 * TOKENS * HIDDEN * 4  # of four experts, whose weight gradient is in I
ROUGHLY = TOKENS * HIDDEN  # for what every stage has beside its layers
UNIT = 1e-15  # seconds an operation


def assert_operations(stage: StageCosts, weights: int, scores: int, repeated: int = 0) -> None:
    """``weights`` is how many a token meets, ``scores`` the operations of attention proper."""
    products = 2 * TOKENS * weights
    forward = products + scores + ROUGHLY
    assert stage.forward == pytest.approx(UNIT * forward)
    assert stage.input_gradient == pytest.approx(UNIT * (forward + scores + repeated))
    assert stage.weight_gradient == pytest.approx(UNIT * (products + ROUGHLY))


def test_a_plain_layer_is_the_papers() -> None:
    """arXiv 2401.10241, table 3: F sbh(24h+4s), I sbh(24h+8s), W 24sbh^2 operations."""
    assert_operations(costs("", 8).stages[3], 12 * HIDDEN**2, SCORES)


def test_grouped_queries_and_a_gated_mlp() -> None:
    flags = "--group-query-attention --num-query-groups 2 --swiglu --ffn-hidden-size 96"
    assert_operations(costs(flags, 8).stages[3], 3 * HIDDEN**2 + 3 * HIDDEN * 96, SCORES)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --disable-bias-linear"


def test_experts_in_every_second_layer() -> None:
    stages = costs(f"{EXPERTS} --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0,1]*4)", 8).stages
    assert_operations(stages[2], ATTENTION + 8 * HIDDEN**2, SCORES)
    assert_operations(stages[3], ATTENTION + 2 * 2 * HIDDEN * 48 + 2 * HIDDEN * 16, SCORES + ROUTER)


@pytest.mark.parametrize(
    ("flags", "stages", "layers"),
    [
        ("--num-layers 6 --pipeline-model-parallel-layout E|t|t|t*2|t|t||L", 8, [0, 1, 1, 2, 1, 1, 0, 0]),
        ("--decoder-first-pipeline-num-layers 2 --num-layers 14", 8, [1, 2, 2, 2, 1, 2, 2, 2]),
    ],
)
def test_uneven_stages(flags: str, stages: int, layers: list[int]) -> None:
    found = costs(f"--pipeline-model-parallel-size 4 {flags}", stages).stages
    for stage, count in zip(found[:-1], layers, strict=False):
        assert_operations(stage, count * 12 * HIDDEN**2, count * SCORES)
    last = layers[-1] * 12 * HIDDEN**2 + HIDDEN * VOCABULARY
    assert_operations(found[-1], last, layers[-1] * SCORES)


def test_what_is_recomputed_runs_again_before_the_gradients() -> None:
    layer = 2 * TOKENS * 12 * HIDDEN**2 + SCORES
    full = "--recompute-granularity full --recompute-method"
    assert_operations(costs(f"{full} uniform", 8).stages[3], 12 * HIDDEN**2, SCORES, repeated=layer)
    block = costs(f"{full} block --recompute-num-layers 1", 4).stages[2]
    assert_operations(block, 24 * HIDDEN**2, 2 * SCORES, repeated=layer)
    selective = costs("--recompute-granularity selective", 8).stages[3]
    assert_operations(selective, 12 * HIDDEN**2, SCORES, repeated=SCORES)
    assert costs("--recompute-activations", 8).stages[3] == selective


PREDICTED = (
    "--pipeline-schedule flex --pipeline-memory-limit 0.5",
    "--pipeline-schedule auto",
    "--pipeline-schedule v-half --pipeline-model-parallel-layout auto",
    "--pipeline-schedule v-half --pipeline-vocabulary auto",
)


@pytest.mark.parametrize("schedule", PREDICTED)
def test_training_chooses_nothing_by_the_costs_of_another_model(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "^a prediction from the model's sizes does not support --te-precision-config-file .*: its rates and "
        "copies of weights are not modelled; measure the stages with mpp rehearse --costs FILE and give "
        "--pipeline-costs FILE"
    )
    assert_refused(monkeypatch, f"{PP4} {schedule} --te-precision-config-file file", line)
    assert read(monkeypatch, f"{PP4} {schedule} --window-size 3,0 --optimizer muon") is not None


def test_stages_without_a_formula_have_no_costs() -> None:
    """What is only said beside an estimate has some."""
    assert costs("--glu-linear-offset 1.0", 8) == costs("", 8)
    with pytest.raises(ValueError, match="does not support --te-precision-config-file file: "):
        costs("--te-precision-config-file file", 8)


def test_measured_stages_may_have_any_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs_file.write(costs("", 8), tmp_path / "costs.json")
    measured = f"--pipeline-costs {tmp_path / 'costs.json'} --te-precision-config-file file"
    assert read(monkeypatch, f"{PP4} {PREDICTED[0]} {measured}") is not None


def test_any_schedule_is_predicted_from_measured_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stages of a finer cut are joined, and others are refused."""
    file = tmp_path / "costs.json"
    stage = StageCosts(1.0, 1.0, 1.0)
    measured = Costs((replace(stage, forward=9.0), *[stage] * 7))
    costs_file.write(measured, file)
    for name, stages in (("v-half", 8), ("1f1b", 4)):
        pipeline = read(monkeypatch, f"{PP4} --pipeline-schedule {name} --pipeline-costs {file}")
        assert pipeline is not None
        asked = RequestedJob.of_args(arguments(f"{PP4} --pipeline-costs {file}"))
        line = start_up.summary(pipeline, start_up.costs_of(asked))
        schedule = catalog.build(name, 4, pipeline.request.microbatches, stages // 4)
        assert f"predicted bubble {simulate(schedule, measured.merged(stages)).bubble:.1%}" in line
    costs_file.write(Costs((stage,) * 6), file)
    flags = f"{PP4} --pipeline-schedule v-half --pipeline-costs {file}"
    assert_refused(monkeypatch, flags, "costs.json: costs of 6 stages cannot be merged into 8")


def test_the_start_line_predicts_nothing_without_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{PP4} --pipeline-schedule v-half --te-precision-config-file file"
    pipeline = read(monkeypatch, flags)
    line = start_up.summary(pipeline, estimate(RequestedJob.of_args(arguments(flags))))
    assert line.endswith(" at unit costs")


def test_the_tokenizer_tells_the_vocabulary_where_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("")
    expected = estimate(RequestedJob.of_args(args)).of(v(4))
    args.vocab_size, tokenizer = None, Namespace(vocab_size=VOCABULARY)
    monkeypatch.setattr(build_tokenizer, "build_tokenizer", lambda args: tokenizer)
    assert estimate(RequestedJob.of_args(args)).of(v(4)) == expected
    args.tokenizer_type = None
    with pytest.raises(ValueError, match="without the size of the vocabulary; give --tokenizer-type"):
        estimate(RequestedJob.of_args(args)).of(v(4))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("", torch.float),
        ("--bf16 --micro-batch-size 3", torch.bfloat16),
        ("--tensor-model-parallel-size 2", torch.float),
        ("--tensor-model-parallel-size 2 --sequence-parallel --fp16", torch.half),
        ("--context-parallel-size 2 --bf16", torch.bfloat16),
        # Megatron's TransformerConfig then sends fp32.
        ("--bf16 --fp32-residual-connection", torch.float),
    ],
)
def test_a_message_is_as_large_as_stock_s(flags: str, dtype: torch.dtype) -> None:
    args = arguments(flags)
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    args.variable_seq_lengths = False
    (shape,) = stock_schedules.get_tensor_shapes(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None,
        config=args,
        tp_group=Namespace(size=lambda: tensor),
        cp_group=Namespace(size=lambda: context),
    )
    assert bytes_between_stages(Job.of(args)) == math.prod(shape) * dtype.itemsize
    assert estimate(RequestedJob.of_args(args)).of(linear(4)).message == bytes_between_stages(Job.of(args))


class Measured(NamedTuple):
    """Bytes of a stage that are kept by its first F, and given back by its first W."""

    kept: int
    left_for_weights: int


LARGER = (
    "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --vocab-size 512 "
    "--pipeline-model-parallel-size 2"
)


PROGRAM = """
import json, sys
from megatron_pp_ext.launch import install
from tests.support import ranks  # the stand-ins for torch.cuda, before Megatron is imported
install()
from tests.megatron import test_model_costs
sys.argv, answers, sys.stdout = sys.argv[:1], sys.stdout, sys.stderr
for line in sys.stdin:
    print(json.dumps(test_model_costs.step_bytes(line.strip())), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def measure() -> Iterator[Callable[[str], tuple[dict[int, Measured], list[int]]]]:
    """Return the four stages of a V on two ranks, and the peak of each rank, by the flags of a job.

    Jobs train in a process of their own: ranks forked after other tests were seen to keep more.
    """
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, **pipes) as process:

        @cache
        def measured(flags: str) -> tuple[dict[int, Measured], list[int]]:
            process.stdin.write(f"{flags}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the job failed"
            stages, peaks = json.loads(answer)
            return {int(stage): Measured(*sizes) for stage, sizes in stages.items()}, peaks

        yield measured


def step_bytes(flags: str) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Return the bytes that each stage keeps and leaves for its W, and the peak of each rank."""
    records = traced(2, f"{LARGER} {flags} --pipeline-schedule v-half".split()).records
    changes: dict[tuple[int, Kind], int] = {}
    for record in records:
        before = 0
        for event in record.events:
            changes.setdefault((event.action.stage, event.action.kind), event.live_bytes - before)
            before = event.live_bytes
    stages = {stage: (changes[stage, Kind.F], -changes[stage, Kind.W]) for stage in range(4)}
    return stages, [record.peak_bytes for record in records]


LATENT = (
    "--spec tests.support.architectures layers --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
MODELS = {
    "plain": "",
    "experts": f"{EXPERTS} --moe-shared-expert-intermediate-size 32",
    "gpt-oss-like": "--softmax-type learnable --window-size 15,0 --window-attn-skip-freq 2 "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --kv-channels 32",
    "gated attention": "--attention-output-gate --qk-layernorm --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --kv-channels 32",
    "expanded again": f"{LATENT} --recompute-granularity selective --recompute-modules mla_up_proj",
    "normed again": f"{LATENT} --recompute-granularity selective --recompute-modules layernorm",
}


@pytest.mark.parametrize("model", first(2, MODELS))
def test_bytes_are_those_of_a_run(model: str, measure: Any) -> None:
    """Stage by stage, and at the peak of a rank, whose moment the schedule's simulation knows."""
    measured, peaks = measure(MODELS[model])
    estimated = costs(f"{LARGER} {MODELS[model]}", 4)
    if "--kv-channels 32" in MODELS[model]:
        # An unfused rotary embedding keeps a cosine and a sine for q and for k, in both layers of a stage.
        tables = 2 * 4 * 4 * 64 * 32
        stages = tuple(
            replace(
                cost,
                activation=cost.activation + tables,
                released_by_input_gradient=cost.released_by_input_gradient + tables,
            )
            for cost in estimated.stages
        )
        estimated = replace(estimated, stages=stages)
    for stage, cost in enumerate(estimated.stages):
        assert measured[stage].kept == pytest.approx(cost.activation, rel=0.04)
        left = cost.activation - cost.released_by_input_gradient
        assert measured[stage].left_for_weights == pytest.approx(left, rel=0.001)
    expected = simulate(catalog.build("v-half", 2, 8), estimated).peak_activations
    assert peaks == pytest.approx(expected, rel=0.05)


FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--disable-bias-linear --recompute-granularity selective --recompute-modules"
LARGE_TOKENS, LARGE_HIDDEN = 128, 64
HIDDEN_BYTES = 4 * LARGE_TOKENS * LARGE_HIDDEN
SCORE_BYTES = 4 * LARGE_TOKENS * 4 * 64
INNER_BYTES = 4 * LARGE_TOKENS * 4 * LARGE_HIDDEN

# What stage 1, of two layers, keeps between F and I instead of what it keeps without recomputation.
RECOMPUTED = {
    f"{FULL} block --recompute-num-layers 1": lambda plain: HIDDEN_BYTES + plain / 2,
    f"{SELECTIVE} core_attn mlp": lambda plain: plain - 2 * (SCORE_BYTES + 2 * INNER_BYTES),
    f"{FULL} uniform --recompute-num-layers 2": lambda plain: HIDDEN_BYTES,
}


@pytest.mark.parametrize("flags", first(2, RECOMPUTED))
def test_recomputation_keeps_less_until_the_gradients_come(flags: str, measure: Any) -> None:
    """W needs as much as ever, so the schedules are told of no less than that."""
    plain, _ = measure("")
    measured, peaks = measure(flags)
    assert measured[1].kept == pytest.approx(RECOMPUTED[flags](plain[1].kept), rel=0.03)
    assert measured[1].left_for_weights == plain[1].left_for_weights
    estimated = costs(f"{LARGER} {flags}", 4)
    cost = estimated.stages[1]
    assert cost.activation - cost.released_by_input_gradient == pytest.approx(plain[1].left_for_weights)
    expected = simulate(catalog.build("v-half", 2, 8), estimated).peak_activations
    assert all(peak < estimate for peak, estimate in zip(peaks, expected, strict=True))
