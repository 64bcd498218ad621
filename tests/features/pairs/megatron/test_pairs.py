"""Forwards and backwards in pairs, by Megatron's plans of its layers, against stock.

Stock has them under its own interleaved schedule, in half precision and with experts on several ranks.  A
plan cuts the graph of a layer where its tokens leave for other ranks, which changes no sum: losses and
gradients are stock's to the last bit.
"""

import functools
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.models.common import model_chunk_schedule_plan
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.utils import get_model_config

from megatron_pp_ext.features.pairs import megatron
from megatron_pp_ext.runtime import split
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file, csv_file, trace_file
from megatron_pp_ext.schedule.recorded import RankRecord, RecordedStep, idle_times
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import frozen, rounding
from tests.support.comparison import TWICE_USED, Result, assert_same_bits, both_gradients, run, stock
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, train

PAIRS = "--overlap-moe-expert-parallel-comm"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --bf16 --accumulate-allreduce-grads-in-fp32 --clip-grad 0"
)
TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 2"
SHARED = "--moe-shared-expert-intermediate-size 32"
MODELS = {
    "experts": (4, f"{TWO} {EXPERTS}"),
    "pp4": (8, f"{FOUR} {EXPERTS} --global-batch-size 16 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2": (
        8,
        f"{TWO} {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "shared": (
        4,
        f"{TWO} {EXPERTS} {SHARED} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "drop": (4, f"{TWO} {EXPERTS} --moe-expert-capacity-factor 1.0 --moe-z-loss-coeff 0.001"),
    "drop-padded": (
        4,
        f"{TWO} {EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "dense-beside": (4, f"{TWO} {EXPERTS} --moe-layer-freq [0]*2+[1]*6"),
    "untied": (4, f"{TWO} {EXPERTS} --untie-embeddings-and-output-weights"),
}
"""What the table of ``features`` has not, whose rows pair the rest with ``in-pairs``."""


def in_pairs(model: str, schedule: str, *more: str, beside: Sequence[str] = ()) -> tuple[Result, Result]:
    """Return what trains in pairs, and stock's interleaved schedule without any overlap.

    ``more`` are flags of both, and ``beside`` those beside the schedule.
    """
    world_size, flags = MODELS[model]
    plain = flags if "virtual" in flags else f"{flags} {CHUNKS}"
    words = [*flags.replace("--num-layers-per-virtual-pipeline-stage 1", "").split(), *more]
    ours = run(world_size, [*words, PAIRS, "--pipeline-schedule", schedule, *beside])
    return ours, stock(world_size, *plain.split(), *more)


SCHEDULES = ("dualpipe-v", "interleaved", "1f1b")


@pytest.mark.parametrize(
    ("model", "schedule"), first(1, [(model, SCHEDULES[at % 3]) for at, model in enumerate(MODELS)])
)
def test_trains_as_stock(model: str, schedule: str) -> None:
    assert_same_bits(*in_pairs(model, schedule))


@pytest.mark.wide
def test_a_frozen_embedding() -> None:
    """The first layers' input takes no gradient, and Megatron's plans run a backward of all their parts."""
    assert_same_bits(*in_pairs("untied", "dualpipe-v", frozen.FLAG, "embedding"))


class Seen(NamedTuple):
    """A rank's first step: its plans with a forward, a backward or both, and each one's weight gradients."""

    plans: Counter[tuple[bool, bool]]
    parts: list[int]
    overlaps: bool
    virtual_stages: int | None


SEEN = Seen(Counter(), [], False, None)


def _watch(chunks: list[Any]) -> None:
    plan = model_chunk_schedule_plan.TransformerModelChunkSchedulePlan
    stock_run, run_part = plan.run, split.STORE.run_part

    def counting(forward: Any, backward: Any, **options: Any) -> Any:
        SEEN.plans[forward is not None, backward is not None] += 1
        return stock_run(forward, backward, **options)

    def noting() -> None:
        slot = split.STORE._slot
        SEEN.parts.append(len(split.STORE._work.get(slot, ())) if slot else 0)
        run_part()

    plan.run, split.STORE.run_part = staticmethod(counting), noting
    initialize_by_layer(chunks)


def _seen(chunks: list[Any]) -> Seen:
    config = get_model_config(chunks[0])
    stages = config.virtual_pipeline_model_parallel_size
    return Seen(Counter(SEEN.plans), list(SEEN.parts), config.overlap_moe_expert_parallel_comm, stages)


@functools.cache
def watched(schedule: str) -> tuple[Schedule, list[Seen], RecordedStep]:
    """The schedule of a job in pairs, what its ranks saw of the first step, and a trace of the last."""
    world_size, flags = MODELS["experts"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        words = [*flags.split(), PAIRS, "--pipeline-schedule", schedule, "--train-iters", "2"]
        runs = train(world_size, [*words, "--pipeline-trace", str(file)], initialize=_watch, grab=_seen)
        step = trace_file.read(file)
    return catalog.build(schedule, 2, 4, paired=True), [run.grabbed for run in runs], step


@pytest.mark.parametrize("schedule", first(1, ["1f1b", "dualpipe-v"]))
def test_what_runs_together_is_seen(schedule: str) -> None:
    """A trace shows both halves of every pair at one time, and the peaks that were predicted."""
    expected, _, step = watched(schedule)
    shown = step.timeline()
    assert shown.schedule.orders == expected.orders
    assert shown.schedule.paired == expected.paired
    peaks = simulate(expected, Costs.unit(expected.placement)).peak_activations
    assert tuple(record.peak_microbatches for record in step.records) == peaks
    for idle in idle_times(step):
        assert min(idle) >= 0
    for record in step.records:
        _require_exchanges_within(record, shown.schedule.paired)


def _require_exchanges_within(record: RankRecord, paired: Collection[Action]) -> None:
    """Every half of a pair exchanges tokens twice in each of its layers, within the pair."""
    ends = {event.action: event.end for event in record.events}
    starts = {event.action: event.start for event in record.events}
    ranks, chunks = 2, len({event.action.stage for event in record.events})
    layers = 8 // (ranks * chunks)
    for forward in paired & ends.keys():
        within = [e for e in record.spans if starts[forward] < e.start and e.end < ends[forward]]
        counted = Counter(e.label.name for e in within)
        names = [
            f"{what} {way}" for what in ("moe_dispatch", "moe_combine") for way in ("forward", "backward")
        ]
        assert counted == dict.fromkeys(names, layers)


@pytest.mark.parametrize("schedule", first(1, ["1f1b", "dualpipe-v"]))
def test_megatron_runs_both_halves_of_a_pair_by_one_plan(schedule: str) -> None:
    expected, seen, _ = watched(schedule)
    for rank, order in enumerate(expected.orders):
        pairs = len(expected.paired.intersection(order))
        forwards = sum(action.kind is Kind.F for action in order) - pairs
        counted = {(True, True): pairs, (True, False): forwards, (False, True): forwards}
        for replica in seen[2 * rank : 2 * rank + 2]:
            assert replica.plans == counted


def test_weight_gradients_come_where_plans_have_a_place() -> None:
    """The products of two experts, two each, then the attention's two; the output layer's with the first."""
    schedule, seen, _ = watched("1f1b")
    for rank, order in enumerate(schedule.orders):
        pairs = len(schedule.paired.intersection(order))
        of_a_pair = [4 + rank, 2, *(4, 2) * 3]
        counted = [number for number in seen[2 * rank].parts if number]
        assert counted == of_a_pair * pairs


def test_one_chunk_stays_one_chunk() -> None:
    """Megatron checks pairs as if the one chunk were a virtual stage, and then knows of none."""
    _, seen, _ = watched("1f1b")
    for rank in seen:
        assert (rank.overlaps, rank.virtual_stages) == (True, None)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """DualPipeV's pairs, written down; in each of them only the input's gradient is computed."""
    halved = catalog.build("dualpipe-v", 2, 4, paired=True).with_halved_backwards
    file = tmp_path / "halved.csv"
    csv_file.write(halved, file)
    assert_same_bits(*in_pairs("experts", f"csv:{file}"))


def flex(folder: Path) -> tuple[str, ...]:
    """Flags under which pairs pay, and a trace."""
    costs_file.write(replace(Costs.per_rank(2, 2), pair=0.7), folder / "costs.json")
    limit = ("--pipeline-memory-limit", "1.25", "--pipeline-costs", str(folder / "costs.json"))
    return (*limit, "--pipeline-trace", str(folder / "trace.json"))


@pytest.mark.wide
def test_flex_chooses_pairs_where_they_pay(tmp_path: Path) -> None:
    assert_same_bits(*in_pairs("experts", "flex", beside=flex(tmp_path)))
    assert trace_file.read(tmp_path / "trace.json").paired


def test_flex_has_no_pairs_without_the_flag(tmp_path: Path) -> None:
    words = [*MODELS["experts"][1].split(), "--pipeline-schedule", "flex", *flex(tmp_path)]
    train(4, [*words, "--train-iters", "1"])
    assert not trace_file.read(tmp_path / "trace.json").paired


@pytest.mark.wide
def test_uneven_stages() -> None:
    """Dense layers before experts, and no layer beside the loss: a pair is as long as its longer half."""
    world_size, flags = MODELS["dense-beside"]
    words = [*flags.split(), "--pipeline-model-parallel-layout", "Et*3|t|t*3|tL", PAIRS]
    ours = run(world_size, [*words, "--pipeline-schedule", "dualpipe-v"])
    assert_same_bits(ours, in_pairs("dense-beside", "dualpipe-v")[1])


@pytest.mark.wide
def test_evaluations_are_stocks() -> None:
    evaluated = ("--eval-iters", "2", "--eval-interval", "2")
    ours, theirs = in_pairs("experts", "dualpipe-v", *evaluated)
    assert ours.validation == theirs.validation
    assert ours.validation


PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")


@pytest.mark.wide
def test_one_prediction_is_stocks_own_in_pairs() -> None:
    """The prediction uses the embedding again, and its weight gradients are summed one by one.

    Stock sums those of one backward in bf16 first, which is two roundings of a number of that precision; the
    later losses are those of weights that may round to the other side.
    """
    world_size, flags = MODELS["experts"]
    theirs = stock(world_size, *flags.split(), *CHUNKS.split(), PAIRS, *PREDICTION)
    ours, _ = in_pairs("experts", "interleaved", *PREDICTION)
    assert "mtp_1 loss" in ours.logged[0]
    assert ours.losses[0] == theirs.losses[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-2)
    for (name, _), gradient, expected in both_gradients(ours, theirs):
        if name in TWICE_USED:
            assert (gradient - expected).abs().max() <= 2 * rounding.BFLOAT16 * expected.abs().max()
        else:
            assert torch.equal(gradient, expected), name


FULL = "--recompute-granularity full --recompute-method"
EACH, TWO_EACH = f"{FULL} uniform --recompute-num-layers 1", f"{FULL} uniform --recompute-num-layers 2"
FIRST = f"{FULL} block --recompute-num-layers 1"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "schedule", "flags"),
    [
        ("experts", "dualpipe-v", TWO_EACH),
        ("dense-beside", "1f1b", EACH),
        ("shared", "interleaved", FIRST),
        ("tp2", "dualpipe-v", EACH),
    ],
)
def test_recomputed_segments_train_as_stock(model: str, schedule: str, flags: str) -> None:
    """Stock recomputes the same layers without any overlap."""
    assert_same_bits(*in_pairs(model, schedule, *flags.split()))


@pytest.mark.wide
def test_recomputed_mlps_of_dense_layers() -> None:
    words = "--recompute-granularity selective --recompute-modules mlp"
    assert_same_bits(*in_pairs("dense-beside", "dualpipe-v", *words.split()))


@pytest.mark.wide
def test_dropout_draws_the_same_numbers_again() -> None:
    dropout = f"{PAIRS} --pipeline-schedule dualpipe-v --hidden-dropout 0.1 --train-iters 2"
    words = [*MODELS["experts"][1].split(), *dropout.split()]
    assert_same_bits(run(4, [*words, *TWO_EACH.split()]), run(4, words))


class Held(NamedTuple):
    """The most layers whose graph a rank held at once in a step, and how often its layers ran forward."""

    most: int
    forwards: int


ROTARY = ("--position-embedding-type", "rope")
SEGMENTS: Counter[str] = Counter()


def _watch_segments(chunks: list[Any]) -> None:
    stock, live = TransformerLayerSchedulePlan.run, set()

    def counting(forward: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(forward, backward, *args, **kwargs)
        live.discard(backward)
        if forward is not None:
            SEGMENTS["forwards"] += 1
            live.add(forward)
        SEGMENTS["most"] = max(SEGMENTS["most"], sum(one.mlp.output is not None for one in live))
        return found

    TransformerLayerSchedulePlan.run = staticmethod(counting)
    initialize_by_layer(chunks)


def _segments_seen(chunks: list[Any]) -> Held:
    return Held(SEGMENTS["most"], SEGMENTS["forwards"])


@functools.cache
def held(flags: str) -> Held:
    words = [*MODELS["experts"][1].split(), PAIRS, "--pipeline-schedule", "1f1b", "--train-iters", "1"]
    return train(4, [*words, *flags.split()], initialize=_watch_segments, grab=_segments_seen)[0].grabbed


@pytest.mark.wide
def test_one_segment_is_held_at_a_time() -> None:
    """The first rank has four layers, and three microbatches in flight."""
    whole, each = held(""), held(EACH)
    assert (whole.most, each.most) == (12, 1)
    assert each.forwards == 2 * whole.forwards


@pytest.mark.parametrize(
    ("method", "size", "count", "found"),
    [("uniform", 2, 5, [2, 2, 1]), ("block", 2, 5, [1, 1]), ("block", 8, 2, [1, 1]), ("uniform", 1, 0, [])],
)
def test_segments_are_those_of_megatrons_methods(
    method: str, size: int, count: int, found: list[int]
) -> None:
    config = SimpleNamespace(recompute_method=method, recompute_num_layers=size)
    assert list(megatron.sizes(config, count)) == found


@pytest.mark.wide
def test_a_prediction_is_not_recomputed() -> None:
    """Its losses and gradients are those of pairs without recomputation."""
    words = MODELS["experts"][1].split()
    words += [PAIRS, "--pipeline-schedule", "interleaved", "--mtp-num-layers", "1", *ROTARY]
    assert_same_bits(run(4, [*words, *EACH.split()]), run(4, words))
