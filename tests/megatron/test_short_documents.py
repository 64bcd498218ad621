"""Documents shorter than a sequence: every stage keeps attention within them, not the outer two alone."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from tests.support import rounding
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import first

END_OF_DOCUMENT = 63
DOCUMENTS = 600
PIPELINE = "--pipeline-model-parallel-size"
APART = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--clip-grad", "0")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags for documents of 4 to 20 tokens, where a sequence has 32."""
    prefix: Path = tmp_path_factory.mktemp("documents") / "short"
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(END_OF_DOCUMENT))
    for length in random.integers(4, 21, DOCUMENTS):
        document = [*random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT]
        builder.add_document(np.array(document), [length])
    builder.finalize(f"{prefix}.idx")
    return ("--data-path", str(prefix), "--split", "98,1,1")


@pytest.mark.parametrize(
    "schedule", first(2, ["", "--pipeline-schedule v-half", "--pipeline-schedule interleaved"])
)
def test_a_mask_for_the_ranks_between_the_ends(schedule: str, flags: tuple[str, ...]) -> None:
    """Stock's own schedule gets it too: started without this package, it is wrong from three ranks on.

    It is right on two ranks, both of which have an end of the model.
    """
    ours = run(4, [PIPELINE, "4", *flags, *APART, *schedule.split()])
    assert_same_bits(ours, stock(2, PIPELINE, "2", *flags, *APART))


def test_one_document_a_sequence_is_another_model(flags: tuple[str, ...]) -> None:
    """The masks of these tests mask something."""
    apart = stock(2, PIPELINE, "2", *flags, *APART)
    assert apart.losses[0] != stock(2, PIPELINE, "2", *flags, *APART[1:]).losses[0]


@pytest.mark.wide
def test_context_parallel_ranks_get_their_part_of_the_mask(flags: tuple[str, ...]) -> None:
    """All tokens count: where some do not, Megatron takes the mean of the means of the ranks' own tokens."""
    mask = ("--reset-attention-mask", "--clip-grad", "0")
    ours = run(4, [PIPELINE, "2", "--context-parallel-size", "2", *flags, *mask])
    theirs = stock(2, PIPELINE, "2", *flags, *mask)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=rounding.relative())
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding.of_losses(updates=1))


@pytest.mark.wide
def test_all_tensor_parallel_ranks_between_the_ends_get_the_mask(flags: tuple[str, ...]) -> None:
    """One of each stage reads it."""
    sizes = ("--num-layers", "6", "--tensor-model-parallel-size", "2", *flags, *APART)
    assert_same_bits(run(6, [PIPELINE, "3", *sizes]), stock(4, PIPELINE, "2", *sizes))
