"""How do families, torch's schedules and compiled ones compare at costs other than the papers' unit?"""

from benchmarks.report import Row, table
from benchmarks.schedules.comparison import Times, beside_compiled, costs_of
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v
from megatron_pp_ext.schedule.simulate import simulate
from reference.published_schedules import MEASURED_COST

PROFILES: dict[str, Times] = {
    "1, 1.1, .7, hop .05": (1, 1.1, 0.7, 0.05),
    "1, 1, .5, hop 0": (1, 1, 0.5, 0),
    "1, 2, 1, hop .1": (1, 2, 1, 0.1),
    "1.5B (ms)": (18.522, 18.086, 9.337, 0.601),
    "6.2B (ms)": (29.718, 29.444, 19.927, 0.527),
    "14.6B (ms)": (11.347, 11.248, 8.132, 0.377),
    "28.3B (ms)": (10.419, 10.207, 7.715, 0.408),
}

FAMILIES = ("1f1b", "zb-h1", "interleaved-zb", "v-min", "v-half", "v-zb")

# The zero bubble paper's automatic schedule with twice 1F1B's memory (ZB-2p), table 5.
ZB_2P = (0.0433, 0.0039, 0.0026, 0.0066, 0.0054, 0.0028)


def unequal_costs() -> str:
    """Families at other costs, and the compiled schedule at the same peak."""
    rows: list[Row] = []
    for label, times in PROFILES.items():
        for p, m, names in ((8, 16, FAMILIES), (16, 32, ("v-min", "v-half"))):
            for name in names:
                rows.append((label, p, m, name, *beside_compiled(catalog.build(name, p, m), times)))
    head = ("costs", "p", "m", "family", "peak (half stages)", "family's", "compiled", "lower bound", "")
    return table(head, rows)


def torchs() -> str:
    """Schedule classes of torch.distributed.pipelining, and the compiled one at the same peak."""
    # Imported here because the processes that ``speed`` forks must not start with torch's memory.
    from tests.support.torchs import TORCH, torch_schedule

    p, m = 8, 16
    rows: list[Row] = []
    for label, times in {"unit": (1, 1, 1, 0), **PROFILES}.items():
        for name, (_, place) in TORCH.items():
            rows.append((label, name, *beside_compiled(torch_schedule(name, place(p), m), times)))
    return table(("costs", "torch's", "peak (half stages)", "torch's", "compiled", "lower bound", ""), rows)


def table5() -> str:
    """Bubble rates of arXiv 2401.10241, table 5, in the longest span."""
    rows: list[Row] = []
    for p, m, forward, i, w, hop, rates in MEASURED_COST:
        costs = costs_of(linear(p), (forward, i, w, hop))
        for name, rate in rates.items():
            ours = round(simulate(catalog.build(name, p, m), costs).bubble_span, 4)
            rows.append(
                (p, m, name, f"{rate:.4f}", f"{ours:.4f}", "met" if ours == rate else f"{ours - rate:+.4f}")
            )
    return table(("p", "m", "schedule", "paper", "simulated", ""), rows)


def memory_limited() -> str:
    """The same pipelines compiled for 1F1B's memory and for twice as much; ZB-2p is made for a short span.

    The column "at least" is a bound for linear placement: rank 0 begins before the last rank does the first
    of its F and I, and ends after the gradient of the last has come back.
    """
    rows: list[Row] = []
    for (p, m, forward, i, w, hop, _), rate in zip(MEASURED_COST, ZB_2P, strict=True):
        halves = Costs((StageCosts(forward / 2, i / 2, w / 2, 0.5),) * (2 * p), hop)
        around = (p - 1) * (forward + i + 2 * hop) + m * (forward + i) + i + w
        least = max(0.0, 1 - m * (forward + i + w) / around)
        for limit in (p, 2 * p):
            for place in (linear(p), v(p)):
                found = compile_schedule(p, m, halves, limit, placements=[place], trials=100).timeline
                paper = f"{rate:.4f}" if limit == 2 * p else ""
                bound = f"{least:.4f}" if place.chunks == 1 else ""
                ours = f"{found.bubble_span:.4f}", f"{found.bubble:.4f}"
                rows.append((p, m, limit, place.shape, paper, bound, *ours))
    head = (
        "p", "m", "limit (stages)", "placement", "ZB-2p, span", "at least", "bubble in span",
        "bubble in makespan",
    )  # fmt: skip
    return table(head, rows)
