"""Draw the README's picture of the schedules: 4 ranks, 8 microbatches, F = I = W, messages free.

    python scripts/readme_picture.py docs/schedules.png

Times are in whole stages, so that schedules with one and with two chunks a rank compare.
"""

import sys
from pathlib import Path

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view.picture import draw

RANKS, MICROBATCHES = 4, 8


def timeline(name: str) -> Timeline:
    """Simulate a schedule whose chunk actions take their share of a stage's time."""
    schedule = catalog.build(name, RANKS, MICROBATCHES)
    share = 1 / schedule.placement.chunks
    costs = Costs.uniform(
        schedule.placement, forward=share, input_gradient=share, weight_gradient=share, hop=0.0
    )
    return simulate(schedule, costs)


if __name__ == "__main__":
    draw({name: timeline(name) for name in ("1f1b", "zb-h1", "v-zb", "v-half", "v-min")}, Path(sys.argv[1]))
