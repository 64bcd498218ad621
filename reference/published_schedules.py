"""Figures of published schedules at unit cost: p, m, makespan, longest span, peak (in chunks).

Read off the schedules that the papers' public implementation (sail-sg/zero-bubble-pipeline-
parallelism) and, for 1f1b and interleaved, Megatron-LM generate, timed by an evaluator that is
not part of this project.  Where our family goes by another name, the published one is beside it.
"""

UNIT_COST = {
    "1f1b": [(4, 8, 33, 33, 4), (4, 16, 57, 57, 4), (8, 8, 45, 45, 8), (8, 16, 69, 69, 8)],
    # ZB1P
    "zb-h1": [(4, 8, 27, 27, 4), (4, 16, 51, 51, 4), (8, 8, 31, 31, 8), (8, 16, 55, 55, 8)],
    # ZB2P
    "zb-h2": [(4, 8, 27, 24, 8), (4, 16, 51, 48, 8), (8, 8, 31, 31, 8), (8, 16, 55, 48, 16)],
    # VPP2: two chunks a rank
    "interleaved": [(4, 8, 57, 57, 11), (4, 16, 105, 105, 11), (8, 8, 69, 69, 16), (8, 16, 117, 117, 23)],
    # ZBV
    "v-zb": [(4, 8, 51, 48, 8), (4, 16, 99, 96, 8), (8, 8, 55, 55, 16), (8, 16, 103, 96, 16)],
    # V-Half, and the same from the adaptive building-block search
    "v-half": [(4, 8, 53, 53, 6), (4, 16, 101, 101, 6), (8, 8, 65, 65, 10), (8, 16, 113, 113, 10)],
    # V-Min for p = 4; for p = 8 the adaptive building-block search, 4 shorter than V-Min
    "v-min": [(4, 8, 59, 59, 4), (4, 16, 107, 107, 4), (8, 8, 71, 71, 8), (8, 16, 119, 119, 8)],
}

# 1F1B-V and the adaptive building-block search, in its three flavours, of the same implementation.
MORE_UNIT_COST = {
    "1f1b-v": [(4, 8, 63, 63, 6), (4, 16, 111, 111, 6), (8, 8, 81, 81, 12), (8, 16, 129, 129, 12)],
    "adaptive, min": [(4, 8, 59, 59, 4), (4, 16, 107, 107, 4), (8, 8, 71, 71, 8), (8, 16, 119, 119, 8)],
    "adaptive, half": [(4, 8, 53, 53, 6), (4, 16, 101, 101, 6), (8, 8, 65, 65, 10), (8, 16, 113, 113, 10)],
    "adaptive, zb": [(4, 8, 51, 48, 8), (4, 16, 99, 96, 8), (8, 8, 57, 55, 14), (8, 16, 103, 96, 16)],
}

# arXiv 2401.10241, table 5 (bubble rates against the longest span) at the times of table 9:
# p, m, ms of F, I, W and a hop, and the bubble rates.
MEASURED_COST = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    (8, 32, 18.513, 18.086, 9.331, 0.626, {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-h2": 0.0837}),
    (8, 64, 18.546, 18.097, 9.321, 0.762, {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444}),
    (16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672}),
    (16, 64, 11.307, 11.254, 8.101, 0.379, {"1f1b": 0.2082, "zb-h1": 0.1088, "zb-h2": 0.0516}),
    (16, 128, 11.325, 11.308, 8.109, 0.378, {"1f1b": 0.1251, "zb-h1": 0.0576, "zb-h2": 0.0266}),
]
