"""A step below which no order of units gets, whatever their chains' order."""

from itertools import pairwise

import numpy as np

from megatron_pp_ext.features.slices.problem import FORWARD, INPUT, Problem


def lower_bound(problem: Problem) -> float:
    """Return a makespan that no schedule of these units is below, in the unit of ``work``.

    It is the larger of two.  A rank cannot begin before the quickest unit has come to it, and has all its
    work to do then; where backwards are whole, the last input gradient has yet to go to the first stage.
    And each chain takes the time of its own way through all stages and back: its units follow each other
    through every stage, of which the slowest holds them up.
    """
    work, where, chains, _ = problem
    seconds, _, _, delays, splits = work
    forward, back = seconds[FORWARD], seconds[INPUT]
    heads = _arrivals(forward, delays).min(axis=1)
    tails = _arrivals(back, delays).min(axis=1)
    kinds = 2 + splits
    per_stage = seconds[:kinds].sum(axis=(0, 2))
    found = 0.0
    for stages in where.stages_of:
        tail = 0.0 if splits else float(tails[stages[0]])
        found = max(found, float(heads[stages[0]] + per_stage[stages].sum()) + tail)
    bounds = [*chains.first.tolist(), seconds.shape[2]]
    of_units = (forward + back).sum(axis=0)
    for begin, end in sorted(pairwise(bounds), key=lambda one: -float(of_units[slice(*one)].sum())):
        if float(of_units[begin:end].sum()) + 2 * float(delays.sum()) <= found:
            break  # the work of a chain is no less than its time, and others have less
        way_back = _flow(back[::-1, begin:end][:, ::-1], delays[::-1])
        found = max(found, _flow(forward[:, begin:end], delays) + way_back)
    return found


def _arrivals(seconds: np.ndarray, delays: np.ndarray) -> np.ndarray:
    """Return for each stage and unit how long the stages before take, with the messages between."""
    before = np.cumsum(seconds[:-1] + delays[:, None], axis=0)
    return np.concatenate([np.zeros((1, seconds.shape[1])), before])


def _flow(seconds: np.ndarray, delays: np.ndarray) -> float:
    """Return how long units take through all stages, one after the other in each."""
    head = _arrivals(seconds, delays)[:, 0]
    tail = _arrivals(seconds[::-1], delays[::-1])[::-1][:, -1]
    return float((head + seconds.sum(axis=1) + tail).max())
