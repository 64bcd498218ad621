"""With dropout, what equals stock goes by the order in which each rank takes which layers forward."""

from tests.support.comparison import assert_same_bits, run, stock

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
PP2 = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", *DROPOUT)
TWO_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "2")


def test_one_stage_a_rank_is_equal_to_stocks_1f1b() -> None:
    assert_same_bits(run(2, [*PP2, "--pipeline-schedule", "zb-h1"]), stock(2, *PP2))


def test_a_loop_is_equal_to_stocks_interleaved() -> None:
    ours = run(2, [*PP2, *TWO_CHUNKS, "--pipeline-schedule", "interleaved-zb"])
    assert_same_bits(ours, stock(2, *PP2, *TWO_CHUNKS))


def test_masks_follow_the_placement() -> None:
    """Neither stock's interleaved nor a V is equal to 1F1B, as the documents say."""
    line, loop = stock(2, *PP2), stock(2, *PP2, *TWO_CHUNKS)
    v = run(2, [*PP2, "--pipeline-schedule", "v-half"])
    assert len({result.losses[0] for result in (line, loop, v)}) == 3
