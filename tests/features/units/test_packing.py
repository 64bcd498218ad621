"""Megatron's packed microbatches, balanced by what they cost."""

from random import Random

import pytest

from megatron_pp_ext.features.units.comparison import PackedSteps
from megatron_pp_ext.features.units.packing import Packing
from megatron_pp_ext.features.units.rates import OVERHEAD

AT = 4000


def packed(lengths: list[int], most: int, replicas: int, copies: int) -> list[list[list[int]]]:
    """Return what a packer makes that fills microbatches in order, each of ``copies`` ranks."""
    parts: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if sum(lengths[one] for one in parts[-1]) + length > most:
            parts.append([])
        parts[-1].append(number)
    while len(parts) % replicas:
        parts.append([next(part for part in reversed(parts) if len(part) > 1).pop()])
    rows = [parts[at : at + replicas] for at in range(0, len(parts), replicas)]
    return [[list(part) for part in row for _ in range(copies)] for row in rows]


def lengths_of(seed: int) -> list[int]:
    random = Random(seed)
    return [min(8000, int(random.lognormvariate(7, 1)) + 1) for _ in range(120)]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_balanced_microbatches_are_never_longer_than_megatrons(seed, copies, multiple):
    """Their number is chosen, too."""
    lengths = lengths_of(seed)
    given = packed(lengths, 8000, 4, copies)
    packing = Packing("1f1b", 4, None, 8000, equal_at=AT, multiple=multiple)
    found = packing.balanced(given, lengths, 4)
    assert len(found) == len(given) or len(found) % multiple == 0
    assert {len(row) for row in found} == {4 * copies}
    assert sorted(one for row in found for part in row[::copies] for one in part) == [*range(len(lengths))]
    assert all(row[at] == row[at - at % copies] for row in found for at in range(4 * copies))
    assert all(sum(lengths[one] for one in part) <= 8000 for row in found for part in row)
    steps = PackedSteps(lengths, "1f1b", 4, None, AT, OVERHEAD)

    def seconds(groups):
        return steps.seconds([[row[replica * copies] for row in groups] for replica in range(4)])

    assert seconds(found) <= seconds(given)


def test_more_microbatches_are_taken_where_they_shorten_the_step():
    """And none where each costs a microbatch's time whatever its length."""
    lengths = [500] * 96
    given = packed(lengths, 6000, 2, 1)
    assert len(given) == 4
    cheap, dear = (
        Packing("1f1b", 8, None, 6000, equal_at=AT, overhead=overhead).balanced(given, lengths, 2)
        for overhead in (0, 20_000)
    )
    assert len(cheap) == 12 > len(dear)


def test_megatrons_microbatches_stay_where_others_do_not_fit():
    lengths = lengths_of(0)
    given = packed(lengths, 8000, 4, 1)
    most = max(len(part) for row in given for part in row)
    assert Packing("1f1b", 4, None, 4000).balanced(given, lengths, 4) is given
    assert Packing("1f1b", 4, None, 8000, most_documents=1).balanced(given, lengths, 4) is given
    assert Packing("interleaved", 7, 2, 8000).balanced(given, lengths, 4) is given, "7 do not divide them"
    found = Packing("1f1b", 4, None, 8000, most_documents=most, equal_at=AT).balanced(given, lengths, 4)
    assert max(len(part) for row in found for part in row) <= most
