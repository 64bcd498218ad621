"""How much of its best rate a GPU reaches in a product of matrices, by the product's shape.

The result is cut into tiles.  Each processor (SM, compute unit) works on a tile at a time, so that parts of
tiles at the edge, and of a last wave that does not fill all processors, are lost; and a tile costs some time
besides its loop over the inner dimension (NVIDIA, Matrix Multiplication Background User's Guide, sections
2.3, 3.1 and 3.2).
"""

import math
from functools import lru_cache

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of cuBLAS, rows x columns, the most efficient ones first (same guide, section 2.3)."""

_MOST_REUSED = 256 * 128 / (256 + 128)
"""Multiplications for each number that the largest tile loads."""

_SLOWER_BY_REUSE = 0.1
"""The power of a tile's reuse by which a smaller tile, which loads more for each product, is slower."""

_LOST_OF_WAVE = 0.5
"""The loss by processors that a last wave leaves idle; kernels that split loops fill the others."""

AROUND_LOOP = 128.0
"""The time of a tile besides its loop, in steps of it, for a system without a value."""


@lru_cache(maxsize=65536)
def efficiency(
    m: float, n: float, k: float, processors: int, around_loop: float = AROUND_LOOP, groups: float = 1
) -> float:
    """Return the share of the best rate that ``groups`` products of m x k with k x n reach, in (0, 1].

    It is the best tile's.  A tile takes ``around_loop`` steps and the k of its loop.  The share is 1
    where the number of ``processors`` is 0, not known.  Both constants above, and the ``around_loop`` of
    every system and type, are fitted to one half of the measured products, and hold for the other half
    (benchmarks/results/components.md).
    """
    if not processors:
        return 1.0
    return max(_with_tile(m, n, k, processors, around_loop, groups, *tile) for tile in _TILES)


def _with_tile(
    m: float, n: float, k: float, processors: int, around: float, groups: float, rows: int, columns: int
) -> float:
    tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
    reuse = rows * columns / (rows + columns) / _MOST_REUSED
    operations = waves(tiles, processors) * processors * rows * columns * (k + around)
    return float(reuse**_SLOWER_BY_REUSE * groups * m * n * k / operations)


def waves(tiles: float, processors: int) -> float:
    """Return how many times as long as one tile ``tiles`` take, of which each processor has one at a time."""
    whole = tiles / processors
    return max(1.0, whole + _LOST_OF_WAVE * (math.ceil(whole) - whole))
