"""Stages with unequal numbers of layers: the ends counted as layers, or given numbers of their own."""

import pytest

from tests.support.comparison import assert_same_gradients, run, stock
from tests.support.tiers import first

PIPELINE = "--pipeline-model-parallel-size"
FLEX = "flex --pipeline-memory-limit 0.75"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


@pytest.mark.parametrize(
    ("ranks", "flags", "schedule"),
    first(
        2,
        [
            # The first and the last stage of a V, both on rank 0, have no layer left.
            (4, f"{EMBEDDING} {LOSS} --num-layers 6", "v-half"),
            (4, f"{FIRST} 1 {LAST} 3", "zb-h1"),
            (4, f"{FIRST} 2 {LAST} 2 --num-layers 12", "interleaved"),
            (2, f"{EMBEDDING} --num-layers 7", "v-zb"),
            (2, f"{LOSS} --num-layers 7", "1f1b"),
            (4, f"{FIRST} 2 --num-layers 14", f"{FLEX} --num-virtual-stages-per-pipeline-rank 2"),
        ],
    ),
)
def test_trains_as_stock(ranks: int, flags: str, schedule: str) -> None:
    base = [PIPELINE, str(ranks), *flags.split()]
    assert_same_gradients(run(ranks, [*base, "--pipeline-schedule", *schedule.split()]), stock(ranks, *base))


def test_the_layout_that_a_v_is_offered_is_the_same_model() -> None:
    """See ``layers.as_v``: the error that refuses given ends under a V spells this layout."""
    ends = (PIPELINE, "4", *f"{FIRST} 1 {LAST} 3".split())
    layout = f"{PIPELINE} 4 --pipeline-model-parallel-layout E|t|t|t|t|t|tt|tL --pipeline-schedule v-half"
    assert_same_gradients(run(4, layout.split()), stock(4, *ends))
