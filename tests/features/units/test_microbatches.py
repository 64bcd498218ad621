"""Files with the lengths of documents, and steps that are drawn from a distribution."""

from random import Random

import pytest

from megatron_pp_ext.features.units.microbatches import Microbatches, drawn_step, read_distribution, read_step


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
        ("[[true]]", "the length true"),
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
