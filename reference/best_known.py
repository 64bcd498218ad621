"""The shortest makespans known for a memory limit: proved by exact solvers, or found by long searches.

They come from this project's own solvers (tests/support/exact.py) and from searches much longer than the
compiler's.  Times are F, I, W and hop of a stage.
"""

# V placement, in slots of half a stage: p, m, times, {live chunks of a rank: makespan}.  Those at unit cost
# are proved optimal except 119; the unequal ones are the best that a long search found, except 638, which is
# proved.
V_SHAPED: list[tuple[int, int, tuple[float, float, float, float], dict[int, float]]] = [
    (4, 8, (1, 1, 1, 0), {3: 86, 4: 59, 5: 56, 6: 53, 8: 51}),
    (6, 6, (1, 1, 1, 0), {5: 58, 6: 53, 7: 50, 8: 47, 10: 43, 12: 41}),
    (8, 16, (1, 1, 1, 0), {8: 119, 16: 103}),
    (4, 8, (10, 11, 7, 1), {4: 638}),
    (8, 16, (10, 11, 7, 1), {8: 1241}),
    (8, 32, (10, 11, 7, 1), {8: 2212}),
    (8, 16, (10, 10, 5, 0), {8: 1095}),
    (8, 32, (10, 10, 5, 0), {8: 1945}),
    (8, 64, (1, 1.1, 0.7, 0.05), {10: 381.5}),
    (16, 32, (10, 11, 7, 1), {12: 2892, 18: 2372}),
    (16, 32, (1, 1.1, 0.7, 0.05), {12: 278.6}),
    (16, 64, (10, 11, 7, 1), {12: 5176, 18: 4164}),
    (16, 64, (1, 1.1, 0.7, 0.05), {18: 411.9}),
]

# A wave of four chunks a rank at unit cost, in whole stages: p, m, {activations of a rank: makespan}.
WAVE_OF_FOUR: list[tuple[int, int, dict[int, float]]] = [
    (4, 8, {2: 27.75, 3: 25.75, 4: 24.75}),
    (8, 8, {4: 31.75, 5: 28.75}),
    (8, 32, {4: 104.25}),
    (16, 64, {8: 209.75}),
]
