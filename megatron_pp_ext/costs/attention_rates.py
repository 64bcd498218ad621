"""How fast a system computes fused attention."""

from operator import itemgetter

from megatron_pp_ext.costs.interpolation import interpolated
from megatron_pp_ext.costs.system import System

_LOST_AT_THE_END = 0.8
"""The loss of attention while its last tiles end, in tiles: queries see unequally many keys.  Fitted, like
``attention_rates``, to one half of the measured kernels (benchmarks/results/components.md)."""


def attention_rate(
    system: System, width: float, keys: float, tiles: float, masked: float = 0, is_backward: bool = False
) -> float | None:
    """Return the operations a second of fused attention, whose masked ones do not count.

    They are those of its forward, or of its backward if ``is_backward``.  Heads have a ``width``, and
    queries see so many ``keys`` on average; there are so many ``tiles`` of ``ATTENTION_TILE`` queries.
    With them ``masked`` keys are computed, which do not count.  Rows are
    interpolated between widths.  None where it is not known.
    """
    rows = (is_backward and system.attention_backward_rates) or system.attention_rates
    if not rows:
        return None
    rows = sorted(rows, key=itemgetter(0))
    rate, around = (interpolated([(row[0], row[column]) for row in rows], width) for column in (1, 2))
    filled = 1.0
    if system.processors:
        per_processor = tiles / system.processors
        filled = per_processor / max(1.0, per_processor + _LOST_AT_THE_END)
    return system.sustained.get("clock", 1.0) * rate * filled * keys / (keys + masked + around)
