"""How far is the lower bound, and the compiler, from optima that a constraint solver proves?"""

from benchmarks.report import Row, table
from benchmarks.schedules.comparison import UNEQUAL, UNIT, costs_of
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.placement import v
from tests.support.exact import shortest

NO_HOP = (10, 10, 5, 0)
CASES = (
    (3, 9, UNEQUAL, 2),
    (3, 8, UNEQUAL, 3),
    (4, 8, UNEQUAL, 4),
    (4, 8, UNEQUAL, 5),
    (4, 8, NO_HOP, 4),
    (4, 8, UNIT, 3),
    (6, 6, UNIT, 5),
)

EFFORT = 120
"""The most steps of the solver for a case, about as many seconds of a core."""


def optima() -> str:
    """V placement near V-Min's memory and below: OR-Tools' CP-SAT for the last rank, the last two, and all.

    In the first two columns of the solver, all other ranks may do everything at once; what is proved for a
    few ranks holds for the pipeline.  The compiler's bound regards one rank at a time.
    """
    rows: list[Row] = []
    for p, m, times, limit in CASES:
        costs = costs_of(v(p), times)
        compiled = compile_schedule(p, m, costs, limit, placements=[v(p)])
        makespan = compiled.timeline.makespan
        proved: list[str] = []
        for ranks in ([p - 1], [p - 2, p - 1], None):
            least, reached = shortest(v(p), m, costs, [limit] * p, effort=EFFORT, hint=makespan, ranks=ranks)
            proved.append(f"{least:g}" if least == reached else f"{least:g} to {reached:g}")
        rows.append((p, m, times, limit, compiled.lower_bound, *proved, makespan))
    solver = "last rank", "last two", "all ranks"
    return table(("p", "m", "F, I, W, hop", "limit", "lower bound", *solver, "compiled"), rows)
