"""Random tokens as Megatron's indexed data, in documents that are longer or shorter than a sequence."""

from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from tests.support.features import SEQUENCE
from tests.support.told_documents import END
from tests.support.training import TOKENS

_DOCUMENTS = {"long": (100, 2 * SEQUENCE, 8 * SEQUENCE), "short": (600, 3, SEQUENCE)}


def write(folder: Path) -> None:
    """Write ``long`` and ``short`` to ``folder``."""
    random = np.random.default_rng(1)
    for name, (count, shortest, longest) in _DOCUMENTS.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=DType.optimal_dtype(TOKENS + 1))
        for length in random.integers(shortest, longest, count):
            document = np.append(random.integers(0, END, length - 1), END)
            builder.add_document(document, [length])
        builder.finalize(str(folder / f"{name}.idx"))
