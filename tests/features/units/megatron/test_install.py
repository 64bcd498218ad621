"""Slices in a loop on megatron.core alone, whose loss is a mean and whose stages all get a mask."""

import pytest

from tests.support import own_loop, own_loop_slices, own_process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``tests.support.own_loop_slices``."""
    return own_process.found("own_loop_slices", tmp_path_factory.mktemp("slices"))


def test_losses_come_back_as_one_for_each_microbatch(found: list[dict]) -> None:
    ours, stock = found[-1]["sliced"].losses, found[-1]["stock"].losses
    assert [len(step) for step in ours] == list(own_loop.COUNTS)
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in zip(ours, stock, strict=True))


def test_data_beside_losses_is_of_whole_microbatches(found: list[dict]) -> None:
    ours, stock = found[-1]["data"], found[-1]["stock data"]
    assert len(ours) == len(stock) == 3
    for one, other in zip(ours, stock, strict=True):
        assert one.shape == other.shape
        assert one.tolist() == [pytest.approx(row, rel=1e-4) for row in other.tolist()]


@pytest.mark.parametrize("kind", own_loop_slices.RETURNS)
def test_what_a_loss_function_returns_is_what_stock_makes_of_it(found: list[dict], kind: str) -> None:
    ours, stock = ([rank[of][kind] for rank in found] for of in ("returns", "stock returns"))
    assert all(stock[-1].losses)
    assert ours[-1].losses == [pytest.approx(step, rel=1e-6) for step in stock[-1].losses]
    own_loop.assert_close_gradients(ours, stock)


def test_a_model_is_evaluated_with_and_without_its_wrapper(found: list[dict]) -> None:
    """Each has a runner, and both work on the same layers."""
    for losses in found[-1]["wrappers"]:
        assert losses == found[-1]["wrappers"][0]
    assert len(found[-1]["wrappers"][0]) == len(found[-1]["stock wrappers"]) == 3


def test_an_evaluation_forgets_the_keys_of_a_sequence_at_its_end(found: list[dict]) -> None:
    """A rank has one sequence in each of its two chunks, and keys and values of each of their layers."""
    assert [rank["keys"] for rank in found] == [2 * own_loop.LAYERS // 2] * 2


def test_a_forward_step_that_changes_outputs_is_refused(found: list[dict]) -> None:
    assert "a forward step which returns what the model returns" in found[-1]["changed"]


def test_sequences_of_another_length_are_refused(found: list[dict]) -> None:
    assert "planned for sequences of 8 tokens" in found[-1]["length"]


def test_the_first_line_has_slices_that_were_chosen(found: list[dict]) -> None:
    assert "sequences in 2 slices of 4 tokens" in found[0]["line"]
    ours, stock = found[-1]["chosen"].losses, found[-1]["stock"].losses
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in zip(ours, stock, strict=True))
