"""The parts into which Megatron's --split cuts data: training, validation and test.

Megatron cuts a data file by its sequences, of which every document has one or more.  A part that gets none of
them would make its GPTDataset count tokens for ever.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DEFAULT = "969,30,1"
"""The split that Megatron takes where --split is not given."""

PARTS = ("training", "validation", "test")


def empty_parts(lengths: npt.NDArray[np.int32], split: str) -> list[str]:
    """Return the ``PARTS`` that ``split`` requests and that get no token.

    ``lengths`` are the tokens of each sequence of one data file.
    """
    # Megatron is imported here, so that what only needs the names above is quick.
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    edges = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    count = len(lengths)
    return [
        part
        for part, edge in zip(PARTS, edges, strict=True)
        # This is how BlendedMegatronDatasetBuilder rounds.
        if edge is not None and not lengths[round(edge[0] * count) : round(edge[1] * count)].sum()
    ]


def working_split(lengths: npt.NDArray[np.int32]) -> str:
    """Return the split nearest to the default that leaves no part empty; with few sequences, of one part."""
    few: Sequence[str] = [f"{len(lengths) - 2},1,1"] if len(lengths) > 2 else []
    for split in (DEFAULT, "98,1,1", "90,5,5", *few):
        if not empty_parts(lengths, split):
            return split
    return "1,0,0"
