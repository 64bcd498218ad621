"""The published order of schedules on a large model with experts, which the planner has to find.

AMD's Primus ran Qwen3-235B-A22B on 32 MI355X under several schedules (``primus-pipeline`` in
``reference/training_runs.json``).  The sizes of batches are not printed and no system describes that device,
so the order is asked for with several numbers of microbatches, on the device before it.
"""

import json
from pathlib import Path

import pytest

import reference
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.schedule.timing import ScheduleTimer

GPUS, PIPELINE, EXPERT_RANKS, LENGTH = 32, 4, 8, 4096
MODEL = {
    "num_layers": 94, "hidden_size": 4096, "ffn_hidden_size": 12288, "num_attention_heads": 64,
    "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "vocab_size": 151936,
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "num_experts": 128, "moe_router_topk": 8,
    "moe_ffn_hidden_size": 1536, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    "bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "micro_batch_size": 1, "seq_length": LENGTH,
    "max_position_embeddings": LENGTH, "pipeline_model_parallel_size": PIPELINE,
    "expert_model_parallel_size": EXPERT_RANKS,
    # 94 layers, the embedding and the loss are 96 parts, which 4 ranks with 3 or 4 chunks divide.
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
OURS = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "interleaved": "interleaved", "v-min": "v-min"}


def published() -> dict[tuple[str, int | None], float]:
    """Tokens a second on each GPU, by our names of schedules and the chunks of a rank."""
    content = json.loads(Path(reference.__file__).with_name("training_runs.json").read_text(encoding="utf-8"))
    (group,) = (group for group in content["groups"] if group["id"] == "primus-pipeline")
    rows = [dict(zip(group["columns"], row, strict=True)) for row in group["rows"]]
    return {
        (OURS[row["schedule"]], row["vp"]): row["tokens_s_gpu"]
        for row in rows
        if row["model"].startswith("qwen3") and row["schedule"] in OURS
    }


def estimated(name: str, chunks: int | None, microbatches: int) -> float:
    more = {"num_virtual_stages_per_pipeline_rank": chunks} if name == "interleaved" else {}
    replicas = GPUS // PIPELINE
    job = describe({**MODEL, "pipeline_schedule": name, "global_batch_size": replicas * microbatches, **more})
    step = estimate_request(job, system.read("mi300x"), for_world(asked_of(job), GPUS)).step_seconds
    return LENGTH * replicas * microbatches / GPUS / step


@pytest.mark.parametrize("microbatches", [8, 16, 32, 64])
def test_interleaved_before_zero_bubble_before_1f1b_before_v_min(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Primus no product of a W runs while an I exchanges tokens."""
    monkeypatch.setattr(ScheduleTimer, "_lends", lambda timer, costs: False)
    measured = published()
    assert len(measured) == 5
    ours = {one: estimated(*one, microbatches) for one in measured}
    assert sorted(ours, key=ours.__getitem__) == sorted(measured, key=measured.__getitem__)
