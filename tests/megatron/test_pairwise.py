"""Every two of Megatron's features together, under some schedule, train as they do under stock 1F1B.

The table is in ``features``; a row that fails runs alone with ``-k`` and its name.
"""

from itertools import combinations

import pytest

from tests.support import rounding
from tests.support.comparison import (
    Result,
    assert_close,
    assert_same_bits,
    assert_same_gradients,
    distance,
    run,
)
from tests.support.features import (
    EXCLUDED,
    FACTORS,
    FEWER,
    FLAGS,
    LARGE_ROWS,
    SEQUENCE,
    Row,
    covering_rows,
    every_level_once,
    job,
    microbatches,
)
from tests.support.tiers import first

ROWS = covering_rows(FEWER, EXCLUDED)
IN_TURN = 16
"""The first rows, which have six of seven pairs; each costs two training runs."""
OTHER_ROWS = covering_rows(FACTORS, EXCLUDED, known=ROWS)
CLIPPED_ABOVE = float(FLAGS["clipping"]["engages"].split()[-1])
HALF_PRECISION = rounding.relative(3 * 10 * 8, rounding.BFLOAT16)
"""Where every tensor is rounded otherwise: ten a layer in eight layers, and twice as many backwards."""
SHARED = every_level_once([row for row in ROWS if row["schedule"] != "in-pairs"])
"""Rows that also train beside a vocabulary that all ranks share, which has no place within a pair."""


@pytest.mark.parametrize(
    "row", first(IN_TURN, [*ROWS, *OTHER_ROWS, *LARGE_ROWS]), ids=lambda row: " ".join(row.values())
)
def test_row(row: Row) -> None:
    ranks, flags, schedule = job(row)
    theirs = run(ranks, flags)
    ours = run(ranks, [*flags, *schedule])
    if row["clipping"] == "off":
        assert_same_bits(ours, theirs)
    else:
        # fp16 may overflow in a later step, which both then have to skip.
        assert all(norm is None or norm > CLIPPED_ABOVE for norm in theirs.norms)
        assert_same_gradients(ours, theirs, later=tolerance(row))
    if row in SHARED:
        limit = ("--pipeline-memory-limit", "2") if "flex" in schedule else ()
        shared = run(ranks, [*flags, *schedule, *limit, "--pipeline-vocabulary", "shared"])
        assert_as_close_as_another_order_of_sums(row, shared, theirs)


def assert_as_close_as_another_order_of_sums(row: Row, ours: Result, theirs: Result) -> None:
    if row["precision"] == "fp32":
        assert_close(ours, theirs)
        return
    assert ours.losses == pytest.approx(theirs.losses, rel=4 * tolerance(row))
    assert distance(ours, theirs) < HALF_PRECISION


def tolerance(row: Row) -> float:
    """How far losses and norms may be apart once the last bit of a clipped update has rounded a weight.

    The errors of two tokens are independent, and at right angles to most of the gradient that they are part
    of.  Of experts, the weight so rounded may send a token to another one, which changes this token's share.
    """
    tokens = SEQUENCE * min(microbatches(row))
    if row["precision"] == "fp32":
        return rounding.relative()
    return (1 if row["model"] == "experts" else HALF_PRECISION) / tokens


@pytest.mark.parametrize(
    ("rows", "factors"), [(ROWS, FEWER), ([*ROWS, *OTHER_ROWS], FACTORS)], ids=["in turn", "with wide ones"]
)
def test_every_pair_is_in_a_row(rows: list[Row], factors: dict[str, tuple[str, ...]]) -> None:
    """Counted over again, factor by factor."""
    for one, other in combinations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        for levels in [(a, b) for a in factors[one] for b in factors[other]]:
            pair = tuple(sorted(zip((one, other), levels, strict=True)))
            assert (levels in met) == (pair not in EXCLUDED), pair


def test_rows_are_few() -> None:
    """Each costs two training runs; the two longest factors make 25, and pairs need jobs of their own."""
    assert len(ROWS) <= 36
