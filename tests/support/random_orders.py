"""Any valid order there is: ranks take actions at random as their inputs become ready."""

from collections import Counter
from random import Random

from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.placement import Placement

_PASSES = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}


def random_schedule(
    random: Random, placement: Placement, microbatches: int, in_turn: str = "", whole: float = 0.4
) -> Schedule:
    """Return a schedule with whole and halved backwards mixed, of which a share ``whole`` are whole.

    Each stage takes the microbatches of the passes ``in_turn`` (F, I, W; a B is an I and a W) one after the
    other.
    """
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    ready = [Action(0, Kind.F, i) for i in range(microbatches)]
    counts: Counter[tuple[int, str]] = Counter()

    def has_its_turn(action: Action) -> bool:
        passes = (letter for letter in _PASSES[action.kind] if letter in in_turn)
        return all(counts[action.stage, letter] == action.microbatch for letter in passes)

    while ready:
        able = [at for at, action in enumerate(ready) if has_its_turn(action)]
        a = ready.pop(able[random.randrange(len(able))])
        counts.update((a.stage, letter) for letter in _PASSES[a.kind])
        orders[placement.rank_of(a.stage)].append(a)
        stage, kind, i = a
        backward = Kind.B if random.random() < whole else Kind.I
        if kind is Kind.F:
            at_end = stage == placement.stages - 1
            ready.append(Action(stage, backward, i) if at_end else Action(stage + 1, Kind.F, i))
        else:
            if kind is Kind.I:
                ready.append(Action(stage, Kind.W, i))
            if kind is not Kind.W and stage > 0:
                ready.append(Action(stage - 1, backward, i))
    return Schedule("random", placement, microbatches, tuple(map(tuple, orders)))
