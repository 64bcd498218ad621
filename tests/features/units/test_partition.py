"""Numbers into parts, and documents into replicas and microbatches."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_pp_ext
from megatron_pp_ext.features.units.comparison import PackedSteps
from megatron_pp_ext.features.units.packing import Packing, partition
from megatron_pp_ext.features.units.rates import OVERHEAD


def sums(numbers, parts):
    return [sum(numbers[place] for place in part) for part in parts]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.data())
def test_every_number_is_in_one_part_and_no_part_is_empty(numbers, data):
    parts = data.draw(st.integers(1, len(numbers)))
    found = partition(numbers, parts)
    assert sorted(place for part in found for place in part) == list(range(len(numbers)))
    assert len(found) == parts
    assert all(found)
    assert max(sums(numbers, found)) - min(sums(numbers, found)) <= max(numbers)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_parts_of_equal_size(parts, size, data):
    numbers = data.draw(st.lists(st.integers(1, 100), min_size=parts * size, max_size=parts * size))
    found = partition(numbers, parts, equal_sizes=True)
    assert sorted(place for part in found for place in part) == list(range(len(numbers)))
    assert all(len(part) == size for part in found)
    assert max(sums(numbers, found)) - min(sums(numbers, found)) <= max(numbers)


def test_many_parts_take_no_more_memory_than_numbers():
    found = partition([2.0] * 1000 + [1.0] * 1000, 1000)
    assert sums([2.0] * 1000 + [1.0] * 1000, found) == [3.0] * 1000
    assert partition([0.0] * 2000, 1000) and all(partition([0.0] * 2000, 1000))


def test_the_example_of_the_paper():
    assert sorted(sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2))) == [14, 16]


@pytest.mark.parametrize(
    ("numbers", "parts", "equal", "words"),
    [([1, 2], 3, False, "2 numbers cannot fill 3"), ([1, 2, 3], 2, True, "3 numbers are not the same")],
)
def test_numbers_that_do_not_divide(numbers, parts, equal, words):
    with pytest.raises(ValueError, match=words):
        partition(numbers, parts, equal_sizes=equal)


LENGTHS = [9_000, 120_000, 4_000, 4_100, 30_000, 900, 2_000, 2_100, 61_000, 3_000, 7_000, 800] * 3


def work(found, lengths):
    """The cost of each replica."""
    return [sum(lengths[at] + lengths[at] ** 2 / 24_576 for part in share for at in part) for share in found]


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 1), (2, 4), (3, 2), (4, 3)])
def test_documents_are_balanced_by_cost(replicas, microbatches):
    found = megatron_pp_ext.balance(LENGTHS, replicas, microbatches)
    assert [len(share) for share in found] == [microbatches] * replicas
    assert sorted(at for share in found for part in share for at in part) == list(range(len(LENGTHS)))
    assert all(part for share in found for part in share)
    costs, longest = work(found, LENGTHS), 120_000 + 120_000**2 / 24_576
    assert max(costs) - min(costs) <= longest


def test_a_replica_with_a_giant_document_still_fills_its_microbatches():
    found = megatron_pp_ext.balance([100_000, *[10] * 7], 2, 4)
    assert all(part for share in found for part in share)


def test_no_microbatch_has_more_tokens_than_it_may():
    found = megatron_pp_ext.balance(LENGTHS, 3, 3, most_tokens=120_000)
    tokens = [sum(LENGTHS[at] for at in part) for share in found for part in share]
    assert max(tokens) <= 120_000
    assert min(tokens) > 0
    with pytest.raises(ValueError, match="do not fit into 3 x 3 microbatches of 70,000 tokens"):
        megatron_pp_ext.balance(LENGTHS, 3, 3, most_tokens=70_000)


def test_the_number_of_microbatches_is_that_of_the_shortest_step():
    """More microbatches leave less of a bubble, and the time of a launch is not counted."""
    found = megatron_pp_ext.balance([2_000] * 64, 2, (4, 16, 8), ranks=4)
    assert len(found[0]) == 16
    with pytest.raises(ValueError, match="and ranks"):
        megatron_pp_ext.balance(LENGTHS, 2, (4, 8))


@pytest.mark.parametrize(
    ("lengths", "sizes", "words"),
    [
        ([5] * 7, (2, 4), "7 documents cannot fill 2 x 4"),
        ([5, 0], (1, 1), "the length of a document is 0"),
        ([5], (0, 1), "replicas is 0"),
    ],
)
def test_documents_that_cannot_be_balanced(lengths, sizes, words):
    with pytest.raises(ValueError, match=words):
        megatron_pp_ext.balance(lengths, *sizes)


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
