"""Packed documents, whose attention a mask keeps apart, in slices that end within them."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from tests.support.comparison import assert_close, run, stock

END_OF_DOCUMENT = 63
APART = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--clip-grad", "0")


@pytest.mark.wide
def test_documents_that_a_mask_keeps_apart(tmp_path: Path) -> None:
    """Slices have unlike numbers of tokens that count, and a microbatch is normalized by all of them."""
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{tmp_path / 'short'}.bin", dtype=DType.optimal_dtype(END_OF_DOCUMENT))
    for length in random.integers(4, 21, 600):
        document = [*random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT]
        builder.add_document(np.array(document), [length])
    builder.finalize(f"{tmp_path / 'short'}.idx")
    flags = ("--data-path", str(tmp_path / "short"), "--split", "98,1,1", *APART)
    flags = ("--pipeline-model-parallel-size", "2", *flags)
    sliced = ("--pipeline-schedule", "v-half", "--pipeline-slice-tokens", "8")
    assert_close(run(2, [*flags, *sliced]), stock(2, *flags))
