"""Activations that wait for their backward on the host (PipeOffload, arXiv 2503.01328, section 3).

The activations of a stage and a microbatch are offloaded, which is a copy to the host after their forward,
and reloaded in time for their backward.  A rank has a copy engine each way, which does one copy after the
other at the same time as its actions.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from megatron_pp_ext.schedule.action import Action
from megatron_pp_ext.schedule.spans import Label

type Way = Literal["out", "back"]
"""A copy to the host, or one back."""

WAYS: dict[Way, str] = {"out": "to the host", "back": "from the host"}
"""In words for people."""

type Kept = tuple[int, int]
"""The activations of a stage and a microbatch."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Which activations are offloaded, and before which action of their rank each of them is reloaded.

    ``reloads`` has what is offloaded: (stage, microbatch) -> an action of the same rank.  The copy to the
    host is launched right after the F of that stage and microbatch, and waits for its end.  The copy back is
    launched before the action: it waits for the end of the action before that one and of the copy to the
    host, and the first backward (I or B) waits for it.  The action comes after the F, and it is this backward
    at the latest.  A pair is one launch, so that the action is never the second one of a pair.

    ``frees`` has the action of the same rank before which the memory on the device is freed, after the F and
    at the latest where the copy back is launched; ``freed_before`` chooses the place for those without one.
    """

    reloads: Mapping[Kept, Action] = field(default_factory=dict, hash=False)
    frees: Mapping[Kept, Action] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self.reloads)

    def __str__(self) -> str:
        """All copies as text, in an order that does not depend on that of ``reloads``."""
        return ",".join(
            f"{unit[0]}.{unit[1]}-{self.frees.get(unit, '')}@{self.reloads[unit]}"
            for unit in sorted(self.reloads)
        )

    def with_actions(self, change: Callable[[Action], Action]) -> Self:
        """Return the same copies at the actions that ``change`` makes of those here."""
        reloads, frees = (
            {unit: change(action) for unit, action in actions.items()}
            for actions in (self.reloads, self.frees)
        )
        return replace(self, reloads=reloads, frees=frees)

    def reloaded_before(self, order: Iterable[Action]) -> dict[Action, list[Kept]]:
        """Return the copies back of a rank with this ``order``, by the action before which they are launched.

        Those before one action are launched in the order of the backwards that wait for them.
        """
        units: dict[Action, list[Kept]] = {}
        for stage, kind, microbatch in order:
            if kind in ("I", "B") and (action := self.reloads.get((stage, microbatch))):
                units.setdefault(action, []).append((stage, microbatch))
        return units

    def freed_before(self, launches: Sequence[Sequence[Action]]) -> dict[Action, list[Kept]]:
        """Return whose memory on the device is freed, by the action of a rank before which it is.

        ``launches`` are the rank's actions in its order, the two of a pair together.  What is computed next
        waits for the copy to the host, so that the memory is free for it, however far the host runs ahead of
        the device.  Where ``frees`` has nothing, the copy runs during at least one launch; the next launch
        after that which takes memory, a forward or a copy back, waits for it, and so does its copy back.
        """
        places = {action: place for place, actions in enumerate(launches) for action in actions}
        reloading = set(self.reloads.values())
        takers = [
            place
            for place, actions in enumerate(launches)
            if actions[0] in reloading or any(action.kind == "F" for action in actions)
        ]
        units: dict[Action, list[Kept]] = {}
        for action, place in places.items():
            unit = action.stage, action.microbatch
            if action.kind == "F" and unit in self.reloads:
                later = takers[bisect(takers, place + 1) :][:1]
                if unit in self.frees:
                    later = [places[self.frees[unit]]]
                before = min([*later, places[self.reloads[unit]]])
                units.setdefault(launches[before][0], []).append(unit)
        return units


def label(way: Way, stage: int, microbatch: int) -> Label:
    """Return the label in a trace of a copy of the activations of ``stage`` and ``microbatch``."""
    words = WAYS[way]
    about = ("stage", stage), ("microbatch", microbatch), ("way", way)
    return Label("copy", f"{stage}.{microbatch} {words}", f"copies {words}", about)
