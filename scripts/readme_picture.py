"""Draw the README's picture of the schedules: 4 ranks, 8 microbatches, F = I = W, messages free.

    python scripts/readme_picture.py docs/schedules.png

Times are a whole rank's, so that schedules with one and with two chunks a rank compare.
"""

import sys
from pathlib import Path

from megatron_pp_ext import Costs, Timeline, build, draw, simulate

RANKS, MICROBATCHES = 4, 8
UNIT = "1 = a rank's F, I or W of one microbatch"


def timeline(name: str) -> Timeline:
    """Simulate a schedule with the unit of ``mpp``: a whole rank's F, I and W take 1 each."""
    schedule = build(name, RANKS, MICROBATCHES)
    return simulate(schedule, Costs.per_rank(RANKS, schedule.placement.chunks))


if __name__ == "__main__":
    draw(
        {name: timeline(name) for name in ("1f1b", "zb-h1", "v-zb", "v-half", "v-min")},
        Path(sys.argv[1]),
        UNIT,
    )
