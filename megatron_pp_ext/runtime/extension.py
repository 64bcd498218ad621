"""What a feature adds to the plan of a rank.

A plan without extensions has the work of stages and the messages between them.  A feature subclasses
``Extension``, overrides what it needs, and returns one for the orders that use it (``Feature.extension``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pp_ext.runtime.operations.compute import Compute
from megatron_pp_ext.runtime.operations.operation import Operation
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.copies import Copies
from megatron_pp_ext.schedule.messages import Launch, Message


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The actions of ``rank`` in a model of ``stages`` stages.

    ``order`` has them one by one; in ``steps`` the two actions of a pair are one tuple.  ``copies`` are those
    of the whole schedule.
    """

    rank: int
    stages: int
    order: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]
    copies: Copies


class Extension:
    """The part of a feature in the plan of one rank; this one adds nothing."""

    def work(self, action: Action) -> Operation | None:
        """Return the operation of an ``action`` that is no work of a stage; None where it is another's."""
        return None

    def extended(self, work: Compute) -> Compute:
        """Return the ``work`` of a stage as the feature needs it."""
        return work

    def joined(self, works: Iterable[Compute]) -> Operation | None:
        """Return the operation in which actions of one step run together; None where it is another's."""
        return None

    def launched(self, launch: Launch) -> Operation | None:
        """Return the operation for what all ranks launch at one place; None where it is another's."""
        return None

    def taken(self, message: Message) -> Operation | None:
        """Return the operation that brings what no stage has sent; None where it is another's."""
        return None

    def handed_over(self, message: Message) -> Operation | None:
        """Return the operation that takes what goes to no stage; None where it is another's."""
        return None

    def before(self, actions: tuple[Action, ...]) -> Iterable[Operation]:
        """Return the operations before ``actions``, before anything is launched or received for them."""
        return ()

    def after(self, works: Iterable[Compute]) -> Iterable[Operation]:
        """Return the operations after the ``works`` of a step and what these send."""
        return ()

    def at_end(self) -> Iterable[Operation]:
        """Return the operations that end a step."""
        return ()
