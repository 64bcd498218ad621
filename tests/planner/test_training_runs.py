"""Estimates against published training runs: errors by kind, the order within sweeps, and what fits."""

from statistics import mean

import pytest

from benchmarks.planner import held_out
from benchmarks.planner.judged import all_judged, by_kind, error, timed
from benchmarks.planner.training_runs import rank_correlation, validation, verdicts
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step import error_band
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.workload import Workload
from reference.published_runs import STAGE_TIMES, StageTimes

GOALS = {
    error_band.DENSE: 0.06,
    error_band.FP8: 0.08,
    error_band.EXPERTS: 0.15,
    error_band.SMALL: 0.20,
    error_band.A100: 0.10,
}


def test_mean_errors() -> None:
    every = held_out.held_out()
    errors = {kind: error(rows) for kind, rows in by_kind(every).items()}
    assert {kind for kind in error_band.KINDS if errors[kind] >= GOALS[kind]} == set()
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


def test_shipped_bands_are_those_of_the_runs() -> None:
    """Where a model or a constant changes: python -m benchmarks.planner.training_runs --fit --keep."""
    for kind, content in validation(held_out.held_out()).items():
        shipped = error_band.validation()[kind]
        assert shipped.keys() == content.keys(), kind
        for name, value in content.items():
            near = pytest.approx(value, abs=0.002) if isinstance(value, float) else value
            assert shipped[name] == near, (kind, name)


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
