"""Units and cuts: every token once, chains in a row, and what is refused."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches, drawn_step, read_distribution, read_step
from megatron_pp_ext.features.units.options import Ordering, Slices, are_by_length, read_tokens, with_order
from megatron_pp_ext.features.units.units import By, Piece, Unit, Units, bounds, cut, named_units, ordered
from megatron_pp_ext.job import call, pipeline
from megatron_pp_ext.job.model_config import in_words_of_call
from megatron_pp_ext.megatron.by_call import read
from tests.features.units.test_choice import asked

DOCUMENTS = some.lists(some.lists(some.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=6)


def test_slices_of_a_microbatch_are_a_chain() -> None:
    units = cut([[4096]] * 2, 1024, rows=2)
    assert units.tokens == (2048,) * 8
    assert units.backwards == (3, 2, 1, 0, 7, 6, 5, 4)
    assert [unit.prefix for unit in units.units] == [0, 1024, 2048, 3072] * 2
    assert sum(units.squares) == 2 * 2 * 4096**2
    assert list(map(str, units.names))[3:5] == ["0.3", "1.0"]
    assert named_units(units.names, rows=2) == units


@given(DOCUMENTS, some.integers(1, 3000), some.sampled_from(["tokens", "cost"]), some.randoms())
def test_cuts_have_every_token_once_in_any_order_of_chains(documents, most, by, random) -> None:
    units = cut(documents, most, by, equal_at=700)
    chains = list(range(len(units.chains)))
    random.shuffle(chains)
    for one in (units, ordered(units, chains)):  # the class checks that all tokens are there once, in order
        assert sum(one.tokens) == sum(map(sum, documents))
        assert sum(one.squares) == sum(length**2 for lengths in documents for length in lengths)
        assert sorted(one.backwards) == list(range(len(one)))
    assert max(units.tokens) <= most


@given(some.integers(2, 10_000), some.integers(1, 50))
def test_slices_of_equal_cost_have_fewer_and_fewer_tokens(length, slices) -> None:
    slices = min(length, slices)
    sizes = [end - begin for begin, end in pairwise(bounds(length, slices, equal_at=2000))]
    assert sum(sizes) == length and min(sizes) >= 1
    assert all(after <= before + 1 for before, after in pairwise(sizes))


@given(some.integers(2, 10_000), some.integers(1, 50), some.integers(0, 100))
def test_no_slice_of_equal_cost_has_more_tokens_than_the_most(length, slices, more) -> None:
    slices = min(length, slices)
    most = -(-length // slices) + more
    sizes = [end - begin for begin, end in pairwise(bounds(length, slices, equal_at=2000, most=most))]
    assert len(sizes) == slices and sum(sizes) == length and min(sizes) >= 1 and max(sizes) <= most


def test_slices_by_cost_are_more_where_attention_costs_much() -> None:
    """Up to twice as many, and no more than there must be where attention costs next to nothing."""
    counts = [len(cut([[65_536]], 8192, equal_at=where)) for where in (1e9, 24_576, 100)]
    assert counts[0] == 8 and counts[0] < counts[1] < counts[2] <= 16
    assert len(cut([[65_536]], 8192)) == len(cut([[65_536]], 8192, "tokens", equal_at=100)) == 8


def test_slices_by_cost_are_nearer_to_each_other() -> None:
    def longest(by: By) -> float:
        units = cut([[65_536]], 8192, by, equal_at=24_576)
        return max(unit.tokens + unit.squares / 24_576 for unit in units.units)

    assert longest("cost") < 0.6 * longest("tokens")


def test_positions_are_those_within_the_microbatch() -> None:
    units = cut([[10, 3, 4]], 5)
    assert [units.positions(number) for number in range(len(units))] == [
        ((0, 5),),
        ((5, 10),),
        ((10, 13),),
        ((13, 17),),
    ]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([Unit(0, 0, 0, (Piece(0, 0, 5),))], "is not whole"),
        ([Unit(0, 0, 0, (Piece(0, 5, 10),)), Unit(0, 1, 0, (Piece(0, 0, 5),))], "do not follow"),
        ([Unit(0, 0, 0, (Piece(0, 0, 5),)), Unit(0, 1, 1, (Piece(0, 5, 10),))], "does not continue"),
        ([Unit(0, 1, 0, (Piece(0, 0, 10),))], "is slice 1, not 0"),
    ],
)
def test_units_that_are_no_step_are_refused(units, message) -> None:
    with pytest.raises(ValueError, match=message):
        Units.of([[10]], units)


def test_a_unit_needs_a_token() -> None:
    with pytest.raises(ValueError, match="most_tokens is 0, but must be"):
        cut([[5]], 0)
    with pytest.raises(ValueError, match="3 tokens do not make 4 slices"):
        bounds(3, 4)


def test_slices_end_where_tensor_parallel_ranks_can_share_them() -> None:
    """Of 20 tokens in units of at most 9, of which 4 ranks have equal parts."""
    units = cut([[20, 4]], 9, multiple=4)
    assert [unit.tokens for unit in units.units] == [4, 8, 8, 4]
    assert all(begin % 4 == end % 4 == 0 for unit in units.units for _, begin, end in unit.pieces)


def test_rows_count_the_tokens_of_a_batch() -> None:
    assert cut([[10], [6]], 5, rows=3).tokens == (15, 15, 9, 9)


@pytest.mark.parametrize(
    "text",
    ["[[4096, 1200], [8000]]", "4096 1200\n8000\n", "4096,1200\n\n  8000", " [[4096,1200],\n[8000]]\n"],
)
def test_a_step_is_read_from_json_and_from_text(text, tmp_path):
    (tmp_path / "lengths").write_text(text)
    found = read_step(tmp_path / "lengths")
    assert found == Microbatches.of([[4096, 1200], [8000]])
    assert found.tokens == (5296, 8000)
    assert found.squares == (4096**2 + 1200**2, 8000**2)
    assert not found.are_alike
    assert found.ordered([1, 0]).tokens == (8000, 5296)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no microbatches"),
        ("[]", "there are no microbatches"),
        ("[[1], []]", "microbatch 1 has no documents"),
        ("[[1], [2.5]]", "microbatch 1 has the length 2.5"),
        ("[[true]]", "the length True"),
        ("[[0]]", "the length 0, but a document has 1 to"),
        ("[[99999999999]]", "the length 99999999999"),
        ("[1, 2]", "must be a list of lists"),
        ('{"a": 1}', "must be a list of lists"),
        ("[[1", "not JSON"),
        ("4096 x", 'line 1 is "4096 x"'),
    ],
)
def test_what_is_no_step_is_refused_with_the_file(text, words, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"a.json: .*{words}"):
        read_step(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["[]", "[[1]]", "{}", "[0]", "[1.5]", "x"])
def test_what_is_no_distribution_is_refused_with_the_file(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: "):
        read_distribution(tmp_path / "a.json")


def test_drawn_steps_fill_microbatches_and_are_the_same_for_a_seed(tmp_path):
    (tmp_path / "a.json").write_text("[10, 20, 30, 5000]")
    lengths = read_distribution(tmp_path / "a.json")
    one, other = (drawn_step(lengths, 6, 100, Random(3)) for _ in range(2))
    assert one == other
    assert len(one) == 6
    for tokens, behind in zip(one.tokens, one.documents[1:], strict=False):
        assert tokens <= 100 < tokens + behind[0]
    assert max(length for part in one.documents for length in part) == 100, "the longest are cut"


def test_slices_keep_the_limit_of_a_compiled_order() -> None:
    sliced = named("flex", 2, 4, limit=0.5).with_option(Slices(4096))
    assert not are_by_length(sliced)
    ordered = with_order(sliced, "search")
    assert ordered.option(Ordering) == Ordering("search")
    assert are_by_length(ordered)
    assert not are_by_length(with_order(sliced, "given"))


def test_a_length_that_cannot_be() -> None:
    for tokens in (0, -1, True, 2.5, "some"):
        with pytest.raises(ValueError, match="must be a whole number from 1 on, or auto"):
            read_tokens(tokens)
    assert read_tokens("auto") is None


@pytest.mark.parametrize("order", [None, "search"])
@pytest.mark.parametrize(("ranks", "limit"), [(8, 0.25), (2, 0.25)])
def test_a_call_makes_no_schedule_of_whole_microbatches(ranks: int, limit: float, order: str | None) -> None:
    """Its plan has a few slices of each sequence; with an order a limit is raised to one sequence."""
    arguments = {"slice_tokens": 4096} if order is None else {"slice_tokens": 4096, "order": order}
    installed = read("flex", ranks=ranks, microbatches=2 * ranks, memory_limit=limit, **arguments)
    if ranks == 2 and order is None:
        with pytest.raises(ValueError, match=r"give at least 0\.5"):
            installed.pipeline()
        return
    pipeline, in_force = installed.pipeline()
    assert pipeline.source is not None
    assert pipeline.source.ordinary.microbatches == 4 * 2 * ranks
    assert in_force.peak == pytest.approx(max(1, limit * ranks), rel=0.1)
    assert "4 slices of each sequence until the model is known" in in_force.line


def test_a_flag_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="must be a whole number or auto"):
        asked("--pipeline-schedule v-half --pipeline-slice-tokens many")


def test_slices_need_not_divide_the_sequence() -> None:
    given = asked("--pipeline-schedule flex --pipeline-memory-limit 0.5 --pipeline-slice-tokens 5000")
    planned = pipeline.read(given.with_arguments(pipeline_order="search"), 1)
    assert are_by_length(planned)
    for request in (pipeline.read(given, 1), planned):
        assert request.option(Slices) == Slices(5000, given.model.seq_length)


@pytest.mark.parametrize("more", [{"offload": 0.5}, {"offload": "auto"}, {"vocabulary": "shared"}])
@pytest.mark.parametrize("order", [None, "rule"])
def test_a_call_that_cannot_be_is_refused_before_there_is_a_model(more: dict, order: str | None) -> None:
    """In whatever order the arguments are given."""
    (name,) = more
    for arguments in ({"slice_tokens": 4, **more}, {**more, "slice_tokens": 4}):
        line = f"^slice_tokens 4 does not support {name}: .*; leave one of"
        with pytest.raises(ValueError, match=line), in_words_of_call():
            call.request_of_call("v-half", 2, 4, **arguments, order=order)
    call.request_of_call("v-half", 2, 4, **more, order=order)
