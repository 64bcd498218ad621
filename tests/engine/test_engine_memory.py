"""What Transformer Engine's layers keep, recorded, against what is planned: neither more nor less."""

import sys

import pytest

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

from megatron_pp_ext import cpu
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.stages import stage_parts
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.runtime import plan
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from tests.support import comparison
from tests.support.flags import arguments

STAGES, MICROBATCHES, VOCABULARY = 2, 8, 512
SMALL = 1.03
"""With what is not counted: statistics of norms, tables of angles, the router's indices."""
LARGER = (
    f"--hidden-size 128 --micro-batch-size 4 --global-batch-size {4 * MICROBATCHES} "
    f"--vocab-size {VOCABULARY} --pipeline-model-parallel-size {STAGES} "
    "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear "
    "--transformer-impl transformer_engine"
)
SPLIT = "--sequence-parallel --tensor-model-parallel-size"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--position-embedding-type rope"
)
OWN = (
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-expert-capacity-factor 1.0 "
    "--moe-pad-expert-input-to-capacity"
)
SEPARATE = "--no-gradient-accumulation-fusion"
CASES = {
    "whole": (1, ""),
    "tensor parallel": (2, "--tensor-model-parallel-size 2"),
    "two ranks": (2, f"{SPLIT} 2"),
    "four ranks": (4, f"{SPLIT} 4"),
    "bf16": (2, f"{SPLIT} 2 --bf16"),
    "experts": (2, f"{SPLIT} 2 {EXPERTS}"),
    "experts' gradients apart": (2, f"{SPLIT} 2 {EXPERTS} {SEPARATE}"),
    "experts of a rank's own": (2, f"{SPLIT} 2 {EXPERTS} {OWN}"),
    "latent": (2, f"{SPLIT} 2 {LATENT} --q-lora-rank 48 --qk-layernorm"),
    "latent, queries whole": (2, f"{SPLIT} 2 {LATENT}"),
    "prediction": (2, f"{SPLIT} 2 --mtp-num-layers 1 --position-embedding-type none"),
}


@pytest.fixture(autouse=True)
def kernels_are_there(monkeypatch):
    """Leave it to the case whether gradients are accumulated by a kernel."""
    needed = tuple(flag for flag in cpu.flags.CPU_FLAGS if flag != (SEPARATE,))
    monkeypatch.setattr(cpu.flags, "CPU_FLAGS", needed)


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_recorded_bytes_are_those_planned(case, lends, monkeypatch):
    """What waits for W is planned to the byte, and the peak of a rank up to what is small.

    Where a W lends products to an I, their operands are released earlier than planned, and what an I gathers
    for a product of its own W stays until that: up to one of the buffers that are planned besides.
    """
    if not lends:
        monkeypatch.setattr(plan, "lenders_of", lambda schedule, rank: {})
    tensor, flags = CASES[case]
    words = f"{LARGER} {flags}"
    job = RequestedJob.of_args(arguments(words))
    model = model_parts(job, vocabulary=VOCABULARY)
    parts = stage_parts(job, model, layers.by_stage(job, STAGES), False)
    records = comparison.traced(STAGES * tensor, [*words.split(), "--pipeline-schedule", "zb-h1"]).records
    for record, part in zip(records, parts, strict=True):
        changes: dict[Kind, int] = {}
        for before, event in zip(
            [0, *(each.live_bytes for each in record.events)], record.events, strict=False
        ):
            # The last W of a stage lends nothing; its first F is the plainest.
            if event.action.kind is Kind.W or event.action.kind not in changes:
                changes[event.action.kind] = event.live_bytes - before
        assert -changes[Kind.W] == part.after_input_gradient
        assert part.after_forward <= changes[Kind.F] <= SMALL * part.after_forward
    planned = Prepared(catalog.build("zb-h1", STAGES, MICROBATCHES)).in_flight.peaks(parts)
    for record, peak in zip(records, planned, strict=True):
        assert record.peak_bytes <= SMALL * peak + lends * model.gather_buffers
        assert lends or peak <= record.peak_bytes
