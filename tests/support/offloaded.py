"""Schedules some or all of whose activations wait on the host."""

from collections.abc import Callable
from dataclasses import replace

from megatron_pp_ext.schedule.actions import Action, Copies, Kept, Kind, Schedule, together


def half(activation: Kept) -> bool:
    """Whether it is one of every other microbatch."""
    return activation[1] % 2 == 0


def everything(activation: Kept) -> bool:
    """Whatever it is."""
    return True


def with_offloaded(schedule: Schedule, leaves: Callable[[Kept], bool] = everything) -> Schedule:
    """Return ``schedule`` with what ``leaves`` names offloaded, each reloaded one launch early.

    What has its backward right after its forward is reloaded before that.
    """
    back: dict[Kept, Action] = {}
    for order in schedule.orders:
        launches = list(together(order, schedule.paired))
        place_of = {action: place for place, actions in enumerate(launches) for action in actions}
        for action, place in place_of.items():
            activation = action.stage, action.microbatch
            if action.kind in (Kind.I, Kind.B) and leaves(activation):
                forward = place_of[Action(action.stage, Kind.F, action.microbatch)]
                back[activation] = launches[max(forward + 1, place - 1)][0]
    return replace(schedule, copies=Copies(back))
