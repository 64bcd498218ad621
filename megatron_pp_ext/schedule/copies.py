"""Activations that wait for their backward on the host (PipeOffload, arXiv 2503.01328, section 3).

The activations of a stage and a microbatch are copied to the host behind their forward, and copied back in
time for their backward.  A rank has a copy engine each way, which does one copy after the other beside its
actions.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from megatron_pp_ext.schedule.spans import Label

if TYPE_CHECKING:  # a schedule has its copies
    from megatron_pp_ext.schedule.actions import Action

type Way = Literal["out", "back"]
"""A copy to the host, or one back."""

WAYS: dict[Way, str] = {"out": "to the host", "back": "from the host"}
"""In words for people."""

type Kept = tuple[int, int]
"""The activations of a stage and a microbatch."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Which activations leave the device, and before which action of their rank each copy back is launched.

    ``back`` has what is away: (stage, microbatch) -> an action of the same rank.  The copy to the host is
    launched right behind the F of that stage and microbatch, and waits for its end.  The copy back is
    launched in front of the action: it waits for the end of the action before that one and of the copy to the
    host, and the first backward (I or B) waits for it.  The action stands behind the F, and it is this
    backward at the latest.  A pair is one launch, so that the action is never the second one of a pair.

    ``gone`` has the action of the same rank in front of which the memory on the device is given up, behind
    the F and at the latest where the copy back is launched; ``given_up_before`` says where that is for what
    it leaves out.
    """

    back: "Mapping[Kept, Action]" = field(default_factory=dict, hash=False)
    gone: "Mapping[Kept, Action]" = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Whether anything is away."""
        return bool(self.back)

    def __str__(self) -> str:
        """All copies as text, in the same order whatever that of ``back``."""
        return ",".join(
            f"{stage}.{microbatch}-{self.gone.get((stage, microbatch), '')}@{self.back[stage, microbatch]}"
            for stage, microbatch in sorted(self.back)
        )

    def with_actions(self, change: "Callable[[Action], Action]") -> "Copies":
        """Return the same copies at the actions that ``change`` makes of those here."""
        back, gone = (
            {kept: change(action) for kept, action in one.items()} for one in (self.back, self.gone)
        )
        return Copies(back, gone)

    def launched_before(self, order: "Iterable[Action]") -> "dict[Action, list[Kept]]":
        """Return the copies back of a rank with this ``order``, by the action before which they are launched.

        Those before one action are launched in the order of the backwards that wait for them.
        """
        found: dict[Action, list[Kept]] = {}
        for stage, kind, microbatch in order:
            if kind in ("I", "B") and (action := self.back.get((stage, microbatch))):
                found.setdefault(action, []).append((stage, microbatch))
        return found

    def given_up_before(self, launches: "Sequence[Sequence[Action]]") -> "dict[Action, list[Kept]]":
        """Return what gives its memory on the device up, by the action of a rank before which it does.

        ``launches`` are the rank's actions in its order, the two of a pair together.  What is computed next
        waits for the copy to the host, so that the memory is free for it, however far the host runs ahead of
        the device.  Where ``gone`` says nothing, the copy runs beside at least one launch; the next launch
        behind that which takes memory, a forward or a copy back, comes after it, and so does its copy back.
        """
        places = {action: place for place, actions in enumerate(launches) for action in actions}
        brought = set(self.back.values())
        takers = [
            place
            for place, actions in enumerate(launches)
            if actions[0] in brought or any(action.kind == "F" for action in actions)
        ]
        found: dict[Action, list[Kept]] = {}
        for action, place in places.items():
            kept = action.stage, action.microbatch
            if action.kind == "F" and kept in self.back:
                later = takers[bisect(takers, place + 1) :][:1]
                if kept in self.gone:
                    later = [places[self.gone[kept]]]
                before = min([*later, places[self.back[kept]]])
                found.setdefault(launches[before][0], []).append(kept)
        return found


def label(way: Way, stage: int, microbatch: int) -> Label:
    """Return what a copy of the activations of ``stage`` and ``microbatch`` is called in a trace."""
    words = WAYS[way]
    about = ("stage", stage), ("microbatch", microbatch), ("way", way)
    return Label("copy", f"{stage}.{microbatch} {words}", f"copies {words}", about)
