"""Models whose tokens meet in other ways than slices know are refused before their first step."""

import pytest

from tests.support import own_process
from tests.support.mixing_models import MODELS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``tests.support.own_loop_mixing``."""
    return own_process.found("own_loop_mixing", tmp_path_factory.mktemp("mixing"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_for_what_slices_do_not_know(found: list[dict], name: str) -> None:
    """On all ranks, also where the layers of one have it alone; any other model trains without a line."""
    expected, *_ = MODELS[name]
    for rank in found:
        error, printed = rank[name]
        if expected:
            assert error.startswith("slices of sequences cannot train this model: ") and expected in error
            assert error.endswith('leave out slice_tokens, or add slice_check="off" if that does not matter')
        else:
            assert error == ""
        assert "could not be checked" not in printed


def test_the_check_leaves_no_trace(found: list[dict]) -> None:
    assert [rank["untouched"] for rank in found] == [[], []]


def test_what_cannot_be_checked_trains_with_a_line(found: list[dict]) -> None:
    (error, printed), (of_other, nothing) = (rank["an argument of its own"] for rank in found)
    assert (error, of_other) == ("", "")
    assert "whether this model can have slices could not be checked: " in printed
    assert "missing a required" in printed
    assert "could not be checked" not in nothing


def test_the_check_can_be_left_out(found: list[dict]) -> None:
    assert [rank["left out"][0] for rank in found] == ["", ""]


def test_steps_that_are_planned_by_length_check_too(found: list[dict]) -> None:
    for rank in found:
        assert "the output of a token depends on other tokens" in rank["by length"][0]


def test_the_check_has_no_more_tokens_than_a_model_has_positions(found: list[dict]) -> None:
    for rank in found:
        error, printed = rank["more tokens than positions"]
        assert error == "" and "could not be checked" not in printed
