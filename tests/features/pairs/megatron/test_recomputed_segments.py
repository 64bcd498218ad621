"""Whole layers that are recomputed in pairs: segments of plans, with stock's losses and gradients."""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

from megatron_pp_ext.features.pairs import megatron
from tests.features.pairs.megatron.test_pairs import MODELS, PAIRS, in_pairs
from tests.support.comparison import assert_same_bits, run
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, train

FULL = "--recompute-granularity full --recompute-method"
EACH, TWO_EACH = f"{FULL} uniform --recompute-num-layers 1", f"{FULL} uniform --recompute-num-layers 2"
FIRST = f"{FULL} block --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("model", "schedule", "flags"),
    first(
        1,
        [
            ("experts", "dualpipe-v", TWO_EACH),
            ("dense-beside", "1f1b", EACH),
            ("shared", "interleaved", FIRST),
            ("tp2", "dualpipe-v", EACH),
        ],
    ),
)
def test_trains_as_stock(model: str, schedule: str, flags: str) -> None:
    """Stock recomputes the same layers without any overlap."""
    assert_same_bits(*in_pairs(model, schedule, *flags.split()))


def test_recomputed_mlps_of_dense_layers() -> None:
    words = "--recompute-granularity selective --recompute-modules mlp"
    assert_same_bits(*in_pairs("dense-beside", "dualpipe-v", *words.split()))


def test_dropout_draws_the_same_numbers_again() -> None:
    dropout = f"{PAIRS} --pipeline-schedule dualpipe-v --hidden-dropout 0.1 --train-iters 2"
    words = [*MODELS["experts"][1].split(), *dropout.split()]
    assert_same_bits(run(4, [*words, *TWO_EACH.split()]), run(4, words))


class Held(NamedTuple):
    """The most layers whose graph a rank held at once in a step, and how often its layers ran forward."""

    most: int
    forwards: int


ROTARY = ("--position-embedding-type", "rope")
SEEN: Counter[str] = Counter()


def _watch(chunks: list[Any]) -> None:
    stock, live = TransformerLayerSchedulePlan.run, set()

    def counting(forward: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(forward, backward, *args, **kwargs)
        live.discard(backward)
        if forward is not None:
            SEEN["forwards"] += 1
            live.add(forward)
        SEEN["most"] = max(SEEN["most"], sum(one.mlp.output is not None for one in live))
        return found

    TransformerLayerSchedulePlan.run = staticmethod(counting)
    initialize_by_layer(chunks)


def _seen(chunks: list[Any]) -> Held:
    return Held(SEEN["most"], SEEN["forwards"])


@functools.cache
def held(flags: str) -> Held:
    words = [*MODELS["experts"][1].split(), PAIRS, "--pipeline-schedule", "1f1b", "--train-iters", "1"]
    return train(4, [*words, *flags.split()], initialize=_watch, grab=_seen)[0].grabbed


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
