"""Published measurements that the models predict; benchmarks/results/planner.md has those that they miss.

AMD's Primus ran Qwen3-235B-A22B on 32 MI355X under several schedules (``primus-pipeline`` in
``reference/training_runs.json``).  The sizes of batches are not printed and no system describes that device,
so the order is asked for with several numbers of microbatches, on the device before it.
"""

import json
from pathlib import Path
from statistics import mean

import pytest

import reference
from benchmarks.planner import error_ranges, held_out
from benchmarks.planner.judged import all_judged, by_kind, error, timed
from benchmarks.planner.published import best_of_grid, llama_step, megatron_step, ranked
from benchmarks.planner.training_runs import rank_correlation, verdicts
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step import error_band
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.timing import ScheduleTimer
from reference.published_runs import GRID, GRID_SCHEDULES, LLAMA, MEGATRON, STAGE_TIMES, StageTimes


def test_the_98b_grid_search(monkeypatch):
    """V-ZB wins at 1,024 tokens, and loses most of its lead over V-Half at 3,072 (arXiv 2405.15362).

    There V-Half wins in the published table; here all five are within 3% of each other.  In the authors'
    runs no product of a W ran while messages of an I travelled.
    """
    monkeypatch.setattr(ScheduleTimer, "_lends", lambda timer, costs: False)
    short, long = (
        {name: best_of_grid(length, family).estimate.utilisation for name, family in GRID_SCHEDULES.items()}
        for length in GRID
    )
    assert ranked(short)[-1] == ranked(GRID[1024])[-1] == "V-ZB"
    assert short["V-ZB"] > 1.02 * short["V-Half"]
    assert long["V-ZB"] < 1.02 * long["V-Half"]


def test_the_order_of_memory_and_the_fastest_of_llama():
    found = {name: llama_step(schedule) for name, (schedule, _, _) in LLAMA.items()}
    memory = {name: step.fullest.total for name, step in found.items()}
    assert ranked(memory) == ranked({name: size for name, (_, _, size) in LLAMA.items()})
    speed = {name: step.tokens_per_second for name, step in found.items()}
    assert ranked(speed)[-1] == ranked({name: rate for name, (_, rate, _) in LLAMA.items()})[-1]


@pytest.mark.parametrize("run", MEGATRON, ids=lambda run: run.name)
def test_megatrons_own_steps(run):
    for selective, seconds in ((False, run.full), (True, run.selective)):
        found = megatron_step(run, selective)
        assert found.step_seconds == pytest.approx(seconds, rel=0.15)
        assert found.fullest.total < 80e9


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


GOALS = {
    error_band.HOPPER: 0.06,
    error_band.FP8_HOPPER: 0.08,
    error_band.BLACKWELL: 0.10,
    error_band.EXPERTS_HOPPER: 0.15,
    error_band.SMALL: 0.20,
    error_band.A100: 0.10,
}


@pytest.mark.wide
def test_mean_errors() -> None:
    every = held_out.held_out()
    errors = {kind: error(rows) for kind, rows in by_kind(every).items()}
    assert {kind for kind in errors if errors[kind] >= GOALS[kind]} == set()
    assert max(error(every), mean(errors.values())) < 0.10


@pytest.mark.wide
def test_the_order_within_sweeps() -> None:
    correlation, jobs = rank_correlation(timed(all_judged()))
    assert jobs > 700
    assert correlation > 0.85


@pytest.mark.wide
def test_what_fits_and_what_does_not() -> None:
    found = verdicts(all_judged())
    assert sum(one.run.ran_out for one, _ in found) == 3
    assert all(is_right for _, is_right in found)


@pytest.mark.wide
def test_stored_ratios_are_those_of_the_runs() -> None:
    """Where a model or a constant changes: python -m benchmarks.planner.error_ranges."""
    written = error_ranges.stored()["project"]
    for kind, group in error_ranges.ratios(error_ranges.of_project()).items():
        assert group.keys() == written[kind].keys()
        for publisher, values in group.items():
            assert values == pytest.approx(written[kind][publisher], abs=0.002), (kind, publisher)


@pytest.mark.parametrize("device", held_out.factors())
def test_shipped_factors_are_those_fitted_with_all_sources(device: str) -> None:
    machine = system.read(device)
    assert held_out.with_factors(machine, held_out.factors()[device][""]) == machine


@pytest.mark.parametrize("times", STAGE_TIMES, ids=lambda times: times.name)
def test_forward_and_both_halves_of_backward(times: StageTimes) -> None:
    """Forward and input gradient come out within 15%, and the weight gradient within 27%.

    The A100's clock is a compromise: weight gradients here take what their products take alone, 0.81 of the
    estimate, and whole steps of other sources take longer than estimated."""
    job = describe(
        {
            "num_layers": times.layers,
            "hidden_size": times.hidden,
            "num_attention_heads": times.heads,
            "seq_length": 1024,
            "max_position_embeddings": 1024,
            "vocab_size": 50257,
            "micro_batch_size": times.samples,
            "global_batch_size": 64 * times.samples,
            "bf16": True,
            "attention_backend": "unfused",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "pipeline_model_parallel_size": times.ranks,
            "pipeline_schedule": "zb-h1",
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
    )
    request = for_world(asked_of(job), times.ranks)
    work = Workload(job, system.read("a100-80g"), request.placement, request.data)
    stage = work.costs.stages[times.ranks // 2]
    found = (stage.forward, stage.input_gradient, stage.weight_gradient)
    for seconds, measured, tolerance in zip(found, times.milliseconds, (0.15, 0.15, 0.27), strict=True):
        assert 1e3 * seconds == pytest.approx(measured, rel=tolerance)
