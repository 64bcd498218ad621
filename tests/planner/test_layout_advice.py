"""Layouts that are advised for stages that were measured."""

import random
from math import fsum

import pytest

from megatron_pp_ext.job import layers
from megatron_pp_ext.planner.layout.requested_layout import advised, divided
from megatron_pp_ext.planner.layout.rows import LayerRow, seconds_of
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear
from tests.support import rounding

ROUNDED = rounding.relative(eps=rounding.FLOAT64)


def stages(seconds):
    """Stages that take ``seconds`` for F, I and W, of which the last two may save some together."""
    each = ((*times[:3], sum(times[3:])) for times in seconds)
    return Costs(tuple(StageCosts(f, i, w, activation=0.0, hidden=h) for f, i, w, h in each), hop=0.01)


@pytest.mark.parametrize("known", [(3, 3), (0, 4), (4, 0), (2, 3, 2), (0, 3, 4, 0), (1, 2, 2, 1, 0)])
@pytest.mark.parametrize("seed", range(2))
def test_layers_and_ends_add_up_to_the_stages(seed, known):
    """Whatever the stages took, the cut that was measured has exactly their seconds."""
    draw = random.Random(seed)
    measured = stages([[*(draw.uniform(1, 3) for _ in range(3)), draw.uniform(0, 1)] for _ in known])
    sizes = [draw.uniform(1, 2) for _ in range(sum(known))]
    seconds, front, back = divided(measured, sizes, known)
    row = LayerRow(seconds, front, back, measured, linear(len(known)), known, lambda cut: [])
    for own, expected in zip(row.costs(known).stages, measured.stages, strict=True):
        assert seconds_of(own) == pytest.approx(seconds_of(expected), rel=ROUNDED)
    assert min(*front[:3], *back[:3]) >= 0 >= max(front[3], back[3])


@pytest.mark.parametrize("known", [(2, 3, 2), (0, 3, 4, 0), (1, 2, 3, 2)])
def test_the_ends_are_what_their_layers_do_not_take(known):
    sizes = [1.0 + at % 2 for at in range(sum(known))]
    ends = {0: 0.25, len(known) - 1: 5.0}
    edges = [sum(known[:stage]) for stage in range(len(known) + 1)]
    took = [fsum(sizes[edges[stage] : edges[stage + 1]]) + ends.get(stage, 0) for stage in range(len(known))]
    seconds, front, back = divided(stages([(each, 2 * each, each, each / 2) for each in took]), sizes, known)
    assert front == pytest.approx((0.25, 0.5, 0.25, -0.125), rel=ROUNDED)
    assert back == pytest.approx((5, 10, 5, -2.5), rel=ROUNDED)
    assert [layer[0] for layer in seconds] == pytest.approx(sizes, rel=ROUNDED)


def test_without_a_stage_between_the_first_has_layers_alone():
    seconds, front, back = divided(stages([(4, 4, 4), (7, 9, 5)]), [1.0] * 6, (3, 3))
    assert front == (0, 0, 0, 0)
    assert back == pytest.approx((3, 5, 1, 0), rel=ROUNDED)
    assert seconds == ((*[4 / 3] * 3, 0),) * 6


MODEL = {
    "num_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 32000,
    "bf16": True,
    "micro_batch_size": 1,
    "global_batch_size": 16,
}


def advice(name, ranks, chunks, took, free=0.0, **changed):
    job = describe({**MODEL, "pipeline_model_parallel_size": ranks, **changed})
    schedule = program(name, ranks, 16, chunks).timer.schedule
    return job, advised(job, 1, stages(took), schedule, name, free)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("v-half", 2)])
def test_a_stage_that_took_long_hands_layers_on(name, chunks):
    """The loss takes as long as two layers, and what is advised is as short as is said."""
    each = 16 // (4 * chunks)
    took = [(each, each, each)] * (4 * chunks - 1) + [(each + 2,) * 3]
    job, found = advice(name, 4, chunks, took)
    assert found is not None
    layout, times = found
    counts = layers.by_stage(job.changed(pipeline_model_parallel_layout=layout), 4 * chunks)
    assert sum(counts) == 16
    assert counts[-1] < each
    costs = stages([(count + 2 * (at == len(counts) - 1),) * 3 for at, count in enumerate(counts)])
    timer = program(name, 4, 16, chunks).timer
    assert max(span.end for span in timer.spans(costs)) == pytest.approx(times.makespan, rel=ROUNDED)
    assert max(span.end for span in timer.spans(stages(took))) == pytest.approx(times.before, rel=ROUNDED)
    assert times.makespan < 0.99 * times.before


def test_stages_that_take_equally_long_stay():
    assert advice("1f1b", 4, 1, [(4, 4, 4)] * 4)[1] is None


@pytest.mark.parametrize(("free", "first"), [(0, 4), (1e9, 4), (1e11, 8)])
def test_no_rank_keeps_more_than_there_is(free, first):
    """Rank 0 has four microbatches in flight, and needs more memory for a fifth layer than others have."""
    job, found = advice("1f1b", 4, 1, [(1, 1, 1), (4, 4, 4), (8, 8, 8), (4, 4, 4)], free)
    assert found is not None
    assert layers.by_stage(job.changed(pipeline_model_parallel_layout=found[0]), 4)[0] == first


@pytest.mark.parametrize(
    "changed",
    [
        {"hybrid_layer_pattern": "*-*-|*-*-|*-*-|*-*-", "num_layers": None},
        {
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
            "pipeline_model_parallel_layout": "Ettttt|ttttt|ttttt|tmL",
        },
    ],
)
def test_models_that_no_layout_is_advised_for(changed):
    took = [(4, 4, 4)] * 3 + [(9, 9, 9)]
    if "mtp_num_layers" in changed:  # beside the loss it is known what it takes
        assert advice("1f1b", 4, 1, took, **changed)[1] is not None
        changed = {**changed, "pipeline_model_parallel_layout": "Ettttt|ttttt|ttttttm|L"}
    assert advice("1f1b", 4, 1, took, **changed)[1] is None
