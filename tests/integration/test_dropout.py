"""With dropout, what equals stock goes by the order in which each rank takes which layers forward."""

from pathlib import Path

import pytest

from tests.support.comparison import assert_same_bits, run, stock
from tests.support.training import train

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
PP2 = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", *DROPOUT)
TWO_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "2")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_one_stage_a_rank_is_equal_to_stocks_1f1b(name: str) -> None:
    assert_same_bits(run(2, [*PP2, "--pipeline-schedule", name]), stock(2, *PP2))


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_a_loop_is_equal_to_stocks_interleaved(name: str) -> None:
    ours = run(2, [*PP2, *TWO_CHUNKS, "--pipeline-schedule", name])
    assert_same_bits(ours, stock(2, *PP2, *TWO_CHUNKS))


def test_masks_follow_the_placement() -> None:
    """Neither stock's interleaved nor a V is equal to 1F1B, as the documents say."""
    line, loop = stock(2, *PP2), stock(2, *PP2, *TWO_CHUNKS)
    v = run(2, [*PP2, "--pipeline-schedule", "v-half"])
    assert len({result.losses[0] for result in (line, loop, v)}) == 3


@pytest.mark.parametrize("name", [None, "1f1b", "v-half"])
def test_a_resumed_run_has_the_masks_of_one_that_never_stopped(name: str | None, tmp_path: Path) -> None:
    flags = [*PP2, *(("--pipeline-schedule", name) if name else ())]
    saved = [*flags, "--save", str(tmp_path), "--save-interval", "2"]
    whole = train(2, [*saved, "--train-iters", "4"])[-1].losses
    resumed = train(2, [*flags, "--load", str(tmp_path), "--ckpt-step", "2", "--train-iters", "4"])[-1].losses
    assert resumed == whole[2:]
