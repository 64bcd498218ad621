"""Sequences of unlike length, and packs of documents, in units that each step plans anew."""

import pytest

from tests.support import own_loop, own_loop_lengths, own_process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``tests.support.own_loop_lengths``."""
    return own_process.found("own_loop_lengths", tmp_path_factory.mktemp("lengths"))


@pytest.mark.parametrize("kind", ["", " packed"])
@pytest.mark.parametrize("name", own_loop_lengths.SCHEDULES)
def test_trains_as_whole_microbatches(found: list[dict], name: str, kind: str) -> None:
    """Losses come back in the order of the data, and weights are those of stock's schedule."""
    ours, stock = ([rank[one + kind] for rank in found] for one in (name, "stock"))
    assert [len(step) for step in ours[-1].losses] == list(own_loop_lengths.COUNTS)
    for one, other in zip(ours[-1].losses, stock[-1].losses, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    own_loop.assert_close_gradients(ours, stock)


@pytest.mark.parametrize("name", own_loop_lengths.SCHEDULES)
def test_evaluates_in_slices(found: list[dict], name: str) -> None:
    """Losses are those of whole sequences, in the order of the data."""
    (losses, calls), (of_stock, calls_of_stock) = (found[-1][f"{one} evaluated"] for one in (name, "stock"))
    assert losses == pytest.approx(of_stock, rel=1e-4)
    fewest = sum(-(-length // own_loop_lengths.TOKENS) for length in own_loop_lengths.LENGTHS)
    assert calls >= fewest > calls_of_stock


def test_routers_losses_count_by_the_tokens_of_a_slice(found: list[dict]) -> None:
    """Whatever forward was last on the rank; also in the log, which adds up several steps here."""
    ours, stock = ([rank[one] for rank in found] for one in ("experts", "stock experts"))
    own_loop.assert_close_gradients([record for record, _ in ours], [record for record, _ in stock])
    for (_, log), (_, other) in zip(ours, stock, strict=True):
        assert log["z_loss"] == pytest.approx(other["z_loss"], rel=1e-5)
        assert any(log["z_loss"])


def test_other_rows_than_the_step_says_are_refused_on_all_ranks(found: list[dict]) -> None:
    for rank in found:
        assert rank["rows"].startswith("a microbatch has 3 rows, and slices that are planned by length need")
        assert "micro_batch_size says, which is 1" in rank["rows"]


def test_a_loss_that_is_no_sum_over_documents_is_refused(found: list[dict]) -> None:
    """At the end of the step, by the rank with the last stage."""
    assert "changes with the outputs of another" in found[-1]["pairs"]
    assert (found[0]["pairs"], found[0]["sums"], found[-1]["sums"]) == ("", "", "")
