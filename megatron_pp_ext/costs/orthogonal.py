"""The computation of Muon: Newton-Schulz iterations make the momentum of a weight's matrix orthogonal.

Keller Jordan, Muon (kellerjordan.github.io/posts/muon), and arXiv 2502.16982 for language models.
"""

from megatron_pp_ext.costs.part import Matrices, Part
from megatron_pp_ext.job.memory_part import Memory


def matrix(memory: Memory, rows: float, columns: float) -> Part:
    """Return a rank's part of a weight, ``rows`` times ``columns``, as an optimizer of matrices sees it.

    An iteration of Muon has the products X X^T, A A and B X, where X has the shorter side first
    (``newton_schulz_step`` in emerging_optimizers.orthogonalized_optimizers.muon_utils).  A weight that joins
    queries, keys and values counts as one matrix, though Muon takes it apart by default.
    """
    if not memory.treats_matrices_apart:
        return Part()
    short, long = sorted((rows, columns))
    operations = 4 * short**2 * long + 2 * short**3
    return Part(matrices=Matrices(rows * columns, operations, 0.0, operations))
