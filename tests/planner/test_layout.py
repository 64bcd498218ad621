"""Cuts of layers into stages: exact where they are to be, and never made longer."""

import random
from itertools import accumulate
from math import fsum

import numpy as np
import pytest

from megatron_pp_ext.job import layers
from megatron_pp_ext.planner.layout.climb import fitted, levelled, shortened
from megatron_pp_ext.planner.layout.cut import Moves, balanced, bounds, even, moved, times, work_of_ranks
from megatron_pp_ext.planner.layout.requested_layout import advised, divided
from megatron_pp_ext.planner.layout.rows import LayerRow, seconds_of
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.programs import placement_of, program
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, loop, v
from tests.support import rounding

ROUNDED = rounding.relative(eps=rounding.FLOAT64)
THREE = linear(3)


class Row:
    """A row of layers of different lengths, with an embedding in front and a loss behind them."""

    def __init__(self, seed, items=7, placement=THREE):
        draw = random.Random(seed)
        self.layers = [self._drawn(draw, 0.5, 2.0) for _ in range(items)]
        self.ends = [self._drawn(draw, 0.1, 3.0) for _ in range(2)]
        self.items, self.placement, self.stages = items, placement, placement.stages
        self.least = (0,) * self.stages

    @staticmethod
    def _drawn(draw, least, most):
        times = [draw.uniform(least, most) for _ in range(3)]
        return *times, -draw.uniform(0, 0.9) * min(times[1:])

    def seconds(self, stage, first, end):
        own = [(0.01, 0.01, 0.01, 0.0), *self.layers[first:end]]
        own += [self.ends[0]] if stage == 0 else []
        own += [self.ends[1]] if stage == self.stages - 1 else []
        return tuple(fsum(layer[kind] for layer in own) for kind in range(4))

    def costs(self, cut):
        each = (self.seconds(*where) for where in bounds(cut))
        return Costs(tuple(StageCosts(f, i, w, hidden=-saved) for f, i, w, saved in each), hop=0.05)

    def longest(self, cut):
        return max(fsum(self.seconds(*where)) for where in bounds(cut))


def every_cut(items, least):
    if len(least) == 1:
        yield from [(items,)] if items >= least[0] else []
        return
    for first in range(least[0], items + 1):
        for others in every_cut(items - first, least[1:]):
            yield first, *others


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("least", [(0, 0, 0), (1, 1, 1, 1), (0, 2, 0, 1), (3, 2, 2)])
def test_the_longest_stage_is_as_short_as_in_any_cut(seed, least):
    row = Row(seed, placement=linear(len(least)))
    found = balanced(7, row.seconds, least)
    cuts = list(every_cut(7, least))
    assert found in cuts
    shortest = min(map(row.longest, cuts))
    assert row.longest(found) == pytest.approx(shortest, rel=ROUNDED)

    def squares(cut):
        return fsum(fsum(row.seconds(*where)) ** 2 for where in bounds(cut))

    as_short = [cut for cut in cuts if row.longest(cut) <= shortest * (1 + ROUNDED)]
    assert squares(found) == pytest.approx(min(map(squares, as_short)), rel=ROUNDED)


@pytest.mark.parametrize(
    ("items", "least", "expected"),
    [
        (7, (0, 0, 0), (3, 2, 2)),
        (6, (0, 4, 0), (1, 4, 1)),
        (3, (1, 1, 1), (1, 1, 1)),
        (2, (0, 0, 0), (1, 1, 0)),
    ],
)
def test_an_even_cut_differs_by_one_layer(items, least, expected):
    assert even(items, least) == expected


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers do not fill 4 stages, which need 4 together"):
        even(3, (1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cut", [(3, 2, 2), (1, 1, 5), (0, 4, 3), (2, 0, 5), (7, 0, 0)])
def test_what_a_move_changes_is_what_the_cut_after_it_has(seed, cut):
    row, draw = Row(seed), np.random.default_rng(seed)
    work, least = draw.integers(0, 9, (4, 3, 4)), (1, 0, 0)
    found = Moves(row.seconds, least).changes(work, cut)
    before = times(cut, row.seconds)
    for source in range(3):
        for target in range(3):
            if source == target or cut[source] <= least[source]:
                assert np.isinf(found[:, source, target]).all()
                continue
            after = times(moved(cut, source, target), row.seconds)
            expected = (work * (after - before)).sum(axis=(1, 2))
            scale = (work * (after + before)).sum()
            assert found[:, source, target] == pytest.approx(expected, abs=ROUNDED * scale)


@pytest.mark.parametrize("placement", [linear(3), v(2), loop(3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_move_evens_out_levelled_ranks(placement, seed):
    row, work = Row(seed, 9, placement), work_of_ranks(placement)

    def squares(cut):
        return float((np.einsum("psk,sk->p", work, times(cut, row.seconds)) ** 2).sum())

    start = balanced(9, row.seconds, row.least)
    found = levelled(row, row.least)
    assert squares(found) <= squares(start) * (1 + ROUNDED)
    others = [moved(found, a, b) for a in range(len(found)) for b in range(len(found)) if a != b and found[a]]
    assert min(map(squares, others)) >= squares(found) * (1 - 2e-9)


SCHEDULES = (("1f1b", 3, 1), ("zb-h1", 3, 1), ("v-half", 2, 2), ("interleaved", 2, 2), ("v-zb", 2, 2))


def replayed(name, ranks, chunks, row, microbatches):
    timer = program(name, ranks, microbatches, chunks).timer
    return lambda cut: timer.critical_path(row.costs(cut))


@pytest.mark.parametrize(("name", "ranks", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_no_move_shortens_a_shortened_pipeline(name, ranks, chunks, seed):
    """Not even one that was not replayed, since a critical path ruled it out.

    A single move at a time finds the best of all cuts of seven layers, or one within a layer of it.
    """
    row = Row(seed, 7, placement_of(name, ranks, chunks))
    replay = replayed(name, ranks, chunks, row, 6)
    start = even(7, row.least)
    found = shortened(row, start, 6, replay, replays=1000)
    cut = found.cut
    assert found.value == replay(cut).makespan <= replay(start).makespan
    others = [moved(cut, a, b) for a in range(len(cut)) for b in range(len(cut)) if a != b and cut[a]]
    assert min(replay(other).makespan for other in others) >= found.value * (1 - 1.1e-4)
    assert found.looked_at < len(others) + 20
    shortest = min(replay(cut).makespan for cut in every_cut(7, row.least))
    from_level = shortened(row, levelled(row, row.least), 6, replay, replays=1000)
    layer = max(fsum(layer) for layer in row.layers)
    assert shortest * (1 - ROUNDED) <= from_level.value < shortest + layer


def test_a_cut_that_does_not_fit_is_not_taken():
    row = Row(1, 8)
    replay = replayed("1f1b", 3, 1, row, 6)
    free = shortened(row, (1, 1, 6), 6, replay)
    assert free.cut != (1, 1, 6)
    kept = shortened(row, (1, 1, 6), 6, replay, fits=lambda cut: cut != free.cut)
    assert kept.cut != free.cut
    assert kept.value > free.value
    row.least = (3, 3, 2)
    with_least = shortened(row, row.least, 6, replay)
    assert (with_least.cut, with_least.looked_at) == ((3, 3, 2), 1)


@pytest.mark.parametrize(("name", "ranks", "chunks"), SCHEDULES)
def test_a_critical_path_bounds_every_other_makespan(name, ranks, chunks):
    row = Row(len(name), 8, placement_of(name, ranks, chunks))
    replay = replayed(name, ranks, chunks, row, 5)
    start = even(8, row.least)
    path = replay(start)
    work, before = np.array(path.work), times(start, row.seconds)
    others = path.makespan - (work * before).sum()
    hops = others / 0.05
    assert hops == pytest.approx(round(hops), abs=1e-6)
    for cut in every_cut(8, (1,) * row.stages):
        after = float((work * times(cut, row.seconds)).sum()) + others
        assert replay(cut).makespan >= after * (1 - ROUNDED)


def test_ranks_that_are_too_full_hand_layers_on():
    row = Row(2, 20, linear(4))
    most = (3, 2, 5, 9)

    def totals(cut):
        return [10.0 * count / room for count, room in zip(cut, most, strict=True)]

    found = fitted(row, (3, 3, 3, 3), totals, 10.0)
    assert found is not None
    assert all(count <= room for count, room in zip(found, most, strict=True))
    assert fitted(row, (4, 4, 4, 7), totals, 10.0) is not None
    assert fitted(row, (4, 4, 4, 8), totals, 10.0) is None


def test_two_stages_of_a_rank_share_its_memory():
    placement = v(2)
    row = Row(3, 8, placement)

    def totals(cut):
        return [float(sum(cut[stage] for stage in placement.stages_of(rank))) for rank in range(2)]

    found = fitted(row, (3, 2, 1, 2), totals, 4.0)
    assert found is not None and totals(found) == [4.0, 4.0]
    assert list(accumulate(found))[-1] == 8


ROUNDED_ADVICE = rounding.relative(eps=rounding.FLOAT64)


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
        assert seconds_of(own) == pytest.approx(seconds_of(expected), rel=ROUNDED_ADVICE)
    assert min(*front[:3], *back[:3]) >= 0 >= max(front[3], back[3])


@pytest.mark.parametrize("known", [(2, 3, 2), (0, 3, 4, 0), (1, 2, 3, 2)])
def test_the_ends_are_what_their_layers_do_not_take(known):
    sizes = [1.0 + at % 2 for at in range(sum(known))]
    ends = {0: 0.25, len(known) - 1: 5.0}
    edges = [sum(known[:stage]) for stage in range(len(known) + 1)]
    took = [fsum(sizes[edges[stage] : edges[stage + 1]]) + ends.get(stage, 0) for stage in range(len(known))]
    seconds, front, back = divided(stages([(each, 2 * each, each, each / 2) for each in took]), sizes, known)
    assert front == pytest.approx((0.25, 0.5, 0.25, -0.125), rel=ROUNDED_ADVICE)
    assert back == pytest.approx((5, 10, 5, -2.5), rel=ROUNDED_ADVICE)
    assert [layer[0] for layer in seconds] == pytest.approx(sizes, rel=ROUNDED_ADVICE)


def test_without_a_stage_between_the_first_has_layers_alone():
    seconds, front, back = divided(stages([(4, 4, 4), (7, 9, 5)]), [1.0] * 6, (3, 3))
    assert front == (0, 0, 0, 0)
    assert back == pytest.approx((3, 5, 1, 0), rel=ROUNDED_ADVICE)
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
    assert max(span.end for span in timer.spans(costs)) == pytest.approx(times.makespan, rel=ROUNDED_ADVICE)
    assert max(span.end for span in timer.spans(stages(took))) == pytest.approx(
        times.before, rel=ROUNDED_ADVICE
    )
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
