"""How much of its best rate a GPU reaches in a product of matrices, by the product's shape.

The result is cut into tiles.  Each processor (SM, compute unit) works on a tile at a time, so that parts of
tiles at the edge, and of a last wave that does not fill all processors, are lost; and a tile costs some time
beside its loop over the inner dimension (NVIDIA, Matrix Multiplication Background User's Guide, sections 2.3,
3.1 and 3.2).
"""

import math
from functools import lru_cache

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of cuBLAS, rows x columns, the most efficient ones first (same guide, section 2.3)."""

_MOST_REUSED = 256 * 128 / (256 + 128)
"""Multiplications for each number that the largest tile loads."""

_AROUND_LOOP = 128
"""What a tile takes beside its loop, in steps of it, of which each takes some 20 ns on an A100: assumed."""


@lru_cache(maxsize=65536)
def efficiency(m: float, n: float, k: float, processors: int) -> float:
    """Return the share of the best rate that a product of m x k with k x n reaches, in (0, 1].

    It is that of the best tile.  A smaller tile loads more for each multiplication, and is taken to be slower
    by the square root of that.  The share is 1 where the number of ``processors`` is 0, not known.
    """
    if not processors:
        return 1.0
    return max(_with_tile(m, n, k, processors, *tile) for tile in _TILES)


def _with_tile(m: float, n: float, k: float, processors: int, rows: int, columns: int) -> float:
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors)
    reuse = rows * columns / (rows + columns) / _MOST_REUSED
    done = waves * processors * rows * columns * (k + _AROUND_LOOP)
    return math.sqrt(reuse) * m * n * k / done
