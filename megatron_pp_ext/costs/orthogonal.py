"""What Muon computes: the momentum of a weight's matrix is made orthogonal by Newton-Schulz iterations.

Keller Jordan, Muon (kellerjordan.github.io/posts/muon), and arXiv 2502.16982 for language models.
"""

from megatron_pp_ext.costs.part import Part


def matrix(rows: float, columns: float) -> Part:
    """Return what Muon sees of a rank's part of a weight, of ``rows`` times ``columns``.

    An iteration has the products X X^T, A A and B X, where X has the shorter side first
    (``newton_schulz_step`` in emerging_optimizers.orthogonalized_optimizers.muon_utils).  A weight that joins
    queries, keys and values counts as one matrix, though Muon takes it apart by default.
    """
    short, long = sorted((rows, columns))
    operations = 4 * short**2 * long + 2 * short**3
    return Part(
        matrix_parameters=rows * columns,
        orthogonal_operations=operations,
        largest_orthogonal=operations,
    )
