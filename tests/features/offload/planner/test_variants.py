"""A search tries activations on the host for what memory keeps out."""

from dataclasses import replace

import pytest

from megatron_pp_ext.features.offload.planner import offloaded
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.lower_bounds import least_memory
from megatron_pp_ext.planner.search.replays import Replays, Workloads
from megatron_pp_ext.planner.step.estimate import MARGIN, StepModel, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.schedule import catalog
from tests.planner.test_configuration_search import A100, estimated, everything, space
from tests.support import rounding


def test_what_does_not_fit_is_tried_with_activations_on_the_host():
    """The best is no slower with copies than without; each that has some needs them, as an estimate says."""
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "micro_batch_size": 4}
    without = space(batch=64, fixed=tuple(sizes), **sizes)
    where = replace(without, job=without.job.changed(pipeline_offload="auto"))
    limit = 25e9
    alone, found = (Search(one, A100, limit, top=8).run() for one in (without, where))
    assert found.best[0].estimate.step_seconds <= alone.best[0].estimate.step_seconds
    away = [one for one in found.named if one.candidate.choice is not None]
    assert away
    for one in away:
        candidate, plain = one.candidate, replace(one.candidate, choice=None)
        assert one.estimate.fullest.total <= limit < estimated(plain, where)[1].fullest.total
        job = candidate.described(where.job)
        told = estimate_request(job, A100, for_world(asked_of(job), where.gpus))
        assert told.step_seconds == pytest.approx(one.estimate.step_seconds, rel=rounding.FLOAT64)
        assert told.fullest == one.estimate.fullest
        assert told.host_bytes == one.estimate.host_bytes and max(told.host_bytes) > 0


def test_a_search_that_ends_early_has_all_that_fits_without_copies(monkeypatch):
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "micro_batch_size": 4}
    without = space(batch=64, fixed=tuple(sizes), **sizes)
    where = replace(without, job=without.job.changed(pipeline_offload="auto"))

    def interrupted(*_):
        raise KeyboardInterrupt

    alone = Search(without, A100, 25e9, top=8).run()
    monkeypatch.setattr(Replays, "varied", interrupted)
    found = Search(where, A100, 25e9, top=8).run()
    assert found.stopped and found.stopped.why == "interrupted" and found.stopped.remaining
    steps = [[one.estimate.step_seconds for one in result.best] for result in (alone, found)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("name", "is_uneven", "vocabulary", "limit"),
    [
        ("v-half", False, 32000, 23.3e9),
        ("interleaved", False, 1024, 17.8e9),
        ("interleaved", True, 1024, 17.9e9),
    ],
)
def test_a_rank_need_not_keep_all_of_its_chunks_where_activations_may_leave(
    name, is_uneven, vocabulary, limit
):
    """What fits with one chunk of a microbatch on the device, and not with all of them, is found."""
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "micro_batch_size": 1}
    sizes |= {"recompute_granularity": None, "vocab_size": vocabulary, "num_layers": 16}
    without = replace(space(batch=1, schedules=(name,), fixed=tuple(sizes), **sizes), is_uneven=is_uneven)
    where = replace(without, job=without.job.changed(pipeline_offload="auto"))
    with pytest.raises(ValueError, match="fits nowhere"):
        Search(without, A100, limit).run()
    found = Search(where, A100, limit).run().best[0]
    assert found.candidate.choice is not None
    assert found.estimate.fullest.total <= limit


@pytest.mark.parametrize("shares", [None, "shared"])
@pytest.mark.parametrize("batch", [1, 3])
def test_no_candidate_is_below_its_bounds_with_activations_on_the_host(batch, shares):
    rounded = rounding.relative(eps=rounding.FLOAT64)
    pipeline = {"pipeline_model_parallel_size": 3, "pipeline_offload": "auto", "micro_batch_size": 1}
    pipeline |= {"recompute_granularity": None, "pipeline_vocabulary": shares, "vocab_size": 32000}
    names = [name for name in catalog.NAMES if catalog.abilities(name).flushes]
    where = space(3, batch, tuple(names), tuple(pipeline), num_layers=18, **pipeline)
    candidates = [one for one in everything(where) if one.pipeline == 3 and not one.options]
    assert len({one.chunks for one in candidates}) > 2
    workloads = Workloads(where.job, A100)
    for one in candidates:
        work, microbatches = workloads.work(one), one.microbatches
        order = Prepared(offloaded(work, one.request(microbatches), 1.0))
        fullest = max(
            StepModel(work, order, one.schedule, microbatches).memory(), key=lambda rank: rank.total
        )
        least = least_memory(work, microbatches, MARGIN, of_largest=True)
        mean = workloads.mean(one, one.placement).memory(microbatches, MARGIN, of_largest=True)
        assert max(least.total, mean.total) <= fullest.total * (1 + rounded)


def test_uneven_layouts_are_tried_with_activations_on_the_host():
    """The best is no slower than without, also where the most even layout does not fit with them."""
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "micro_batch_size": 4}
    layouts = space(schedules=("1f1b", "v-half"), batch=64, fixed=tuple(sizes), vocab_size=64000, **sizes)
    without = replace(layouts, is_uneven=True)
    where = replace(without, job=without.job.changed(pipeline_offload="auto"))
    limit = 24e9
    alone, found = (Search(one, A100, limit, top=8).run() for one in (without, where))
    assert found.best[0].estimate.step_seconds <= alone.best[0].estimate.step_seconds
    (away,) = (one for one in found.named if one.candidate.choice is not None)
    candidate = away.candidate
    stages = Workloads(where.job, A100).stages(candidate, candidate.placement)
    assert candidate.layout != stages.layout(stages.start)
    plain = estimated(replace(candidate, choice=None), where)[1]
    assert away.estimate.fullest.total <= limit < plain.fullest.total
    job = candidate.described(where.job)
    told = estimate_request(job, A100, for_world(asked_of(job), where.gpus))
    assert told.step_seconds == pytest.approx(away.estimate.step_seconds, rel=rounding.FLOAT64)
    assert told.fullest == away.estimate.fullest
