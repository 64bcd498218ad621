"""The same questions answered slowly, by other means, for the tests to compare with.

A copy of a stage and a microbatch is ("out", stage, microbatch) or ("back", stage, microbatch).

Starts are the least solution of "not before the action in front, not before the inputs": every
bound is raised until none is broken, and where that never ends the ranks wait for each other.
"""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from megatron_pp_ext.schedule import placement as places
from megatron_pp_ext.schedule.actions import Action, Copies, Kind, together
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from tests.support.random_orders import random_schedule


def starts(schedule, costs):
    """Start of every action and copy, or None for a deadlock."""
    rank_of = {a: rank for rank, order in enumerate(schedule.orders) for a in order}
    last = schedule.placement.stages - 1
    groups = {a: group for o in schedule.orders for group in together(o, schedule.paired) for a in group}

    def seconds(a):
        """A pair takes its share of what its two actions take, and no less than either."""
        of_group = [alone(member) for member in groups.get(a, (a,))]
        return max(costs.pair * sum(of_group), *of_group) if len(of_group) > 1 else of_group[0]

    def alone(a):
        if a[0] in ("out", "back"):
            return costs.stages[a[1]].copy
        stage = costs.stages[a.stage]
        return {
            "F": stage.forward,
            "I": stage.input_gradient,
            "W": stage.weight_gradient,
            "B": stage.input_gradient + stage.weight_gradient - stage.hidden,
        }[a.kind]

    def backward(stage, microbatch):
        whole = Action(stage, Kind.B, microbatch)
        return whole if whole in rank_of else Action(stage, Kind.I, microbatch)

    bounds = []
    for order in schedule.orders:
        # The two of a pair start together.
        bounds += [(a, b, -seconds(a) if groups[a] is groups[b] else 0) for a, b in pairwise(order)]
        bounds += [(b, a, -seconds(b)) for a, b in pairwise(order) if groups[a] is groups[b]]
    for a in rank_of:
        stage, kind, microbatch = a
        before = []
        if kind == "F" and stage > 0:
            before = [Action(stage - 1, Kind.F, microbatch)]
        elif kind == "W":
            before = [Action(stage, Kind.I, microbatch)]
        elif kind in "IB":
            before = [Action(stage, Kind.F, microbatch)]
            if stage < last:
                before.append(backward(stage + 1, microbatch))
        bounds += [(b, a, costs.hop if rank_of[a] != rank_of[b] else 0) for b in before]
    for order in schedule.orders:
        engines = {"out": [], "back": []}
        place = {a: at for at, a in enumerate(order)}
        away = {key: a for key, a in schedule.copies.reloads.items() if a in place}
        for key in sorted(away, key=lambda key: place[Action(key[0], Kind.F, key[1])]):
            engines["out"].append(("out", *key))
            bounds.append((Action(key[0], Kind.F, key[1]), ("out", *key), 0))
        for key in sorted(away, key=lambda key: (place[away[key]], place[backward(*key)])):
            engines["back"].append(("back", *key))
            bounds += [
                (order[place[away[key]] - 1], ("back", *key), 0),
                (("out", *key), schedule.copies.frees[key], 0),
                (("out", *key), ("back", *key), 0),
                (("back", *key), backward(*key), 0),
            ]
            # What is launched in front of an action comes behind what is given up there.
            bounds += [
                (("out", *other), ("back", *key), 0)
                for other in away
                if schedule.copies.frees[other] == away[key]
            ]
        bounds += [(a, b, 0) for engine in engines.values() for a, b in pairwise(engine)]

    nodes = {a for before, after, _ in bounds for a in (before, after)} | set(rank_of)
    start_of = dict.fromkeys(nodes, 0)
    for _ in range(len(nodes) + 1):
        changed = False
        for before, after, delay in bounds:
            least = start_of[before] + seconds(before) + delay
            if start_of[after] < least:
                start_of[after] = least
                changed = True
        if not changed:
            return start_of
    return None


def live(schedule, costs, start, rank, moment):
    """Activations that ``rank`` keeps at ``moment``, after all that starts and ends then."""
    memory = 0
    for a in schedule.orders[rank]:
        stage = costs.stages[a.stage]
        seconds = stage.seconds(a.kind)
        if a.kind == "F" and start[a] <= moment:
            memory += stage.activation
        elif start[a] + seconds <= moment:
            memory += stage.kept(a.kind)
        elif a.kind == "B" and start[a] <= moment:
            memory += stage.workspace_in_whole
        elif a.kind == "I" and start[a] <= moment:
            memory += stage.workspace - min(0, stage.released_by_input_gradient)
    order, copies = schedule.orders[rank], schedule.copies

    def end_before(action):
        before = order[order.index(action) - 1]
        return start[before] + costs.stages[before.stage].seconds(before.kind)

    def away(key):
        return start["out", *key] + costs.stages[key[0]].copy

    for key, action in copies.reloads.items():
        if action in order:
            given_up = max(end_before(copies.frees[key]), away(key))
            earlier = [away(other) for other, place in copies.frees.items() if place == action]
            launched = max([end_before(action), *earlier])
            memory += costs.stages[key[0]].activation * ((launched <= moment) - (given_up <= moment))
    return memory


@st.composite
def placements(draw):
    ranks = draw(st.integers(2, 4))
    return draw(
        st.sampled_from([places.linear(ranks), places.loop(ranks, 2), places.v(ranks), places.wave(ranks, 3)])
    )


@st.composite
def schedules(draw):
    """Any valid schedule."""
    random = draw(st.randoms(use_true_random=False))
    return random_schedule(random, draw(placements()), draw(st.integers(1, 4)))


@st.composite
def copying(draw, schedule):
    """``schedule``, which has no pairs, with any valid copies."""
    back, gone = {}, {}
    for order in schedule.orders:
        place = {a: at for at, a in enumerate(order)}
        for a in order:
            if a.kind in "IB" and draw(st.booleans()):
                first = place[Action(a.stage, Kind.F, a.microbatch)] + 1
                last = draw(st.integers(first, place[a]))
                back[a.stage, a.microbatch] = order[last]
                gone[a.stage, a.microbatch] = order[draw(st.integers(first, last))]
    return replace(schedule, copies=Copies(back, gone))


@st.composite
def costs_of(draw, schedule):
    """Whole numbers, so that times compare exactly."""
    stages = []
    for _ in range(schedule.placement.stages):
        f, i, w, activation = draw(st.tuples(*[st.integers(1, 9)] * 4))
        released, copy = draw(st.integers(-9, activation)), draw(st.integers(0, 9))
        hidden = draw(st.integers(0, min(i - 1, w)))
        workspaces = {name: draw(st.integers(0, 5)) for name in ("workspace", "workspace_in_whole")}
        stages.append(StageCosts(f, i, w, activation, released, copy=copy, hidden=hidden, **workspaces))
    return Costs(tuple(stages), draw(st.integers(0, 5)))
