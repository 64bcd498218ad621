"""Compile a schedule, simulate it beside two published ones, and draw all three: python_api.py [FILE.png]."""

import sys

from megatron_pp_ext import Costs, build, compile_schedule, draw, simulate

RANKS, MICROBATCHES = 4, 8
LIMIT = 3.0  # microbatches of a whole rank, which is what V-Half keeps; 1F1B keeps 4 on its first rank


def costs(chunks: int) -> Costs:
    """Return milliseconds of a rank's forward, input gradient and weight gradient, and of a message's way."""
    return Costs.per_rank(RANKS, chunks, forward=10, input_gradient=11, weight_gradient=7, hop=0.5)


steps = {
    "1F1B": simulate(build("1f1b", RANKS, MICROBATCHES), costs(chunks=1)),
    "V-Half": simulate(build("v-half", RANKS, MICROBATCHES), costs(chunks=2)),
    "compiled": compile_schedule(RANKS, MICROBATCHES, costs(chunks=2), LIMIT).timeline,
}
for name, step in steps.items():
    print(
        f"{name:9} {step.makespan:6.1f} ms, bubble {step.bubble:5.1%}, "
        f"peak {max(step.peak_activations):.1f} microbatches"
    )
picture = sys.argv[1] if len(sys.argv) > 1 else "schedules.png"
draw(steps, picture)
print(f"the picture is {picture}")
