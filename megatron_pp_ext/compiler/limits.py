"""The memory limit of a rank: the meaning of a requested limit, and the lowest that any order can keep.

A limit holds activations, and also messages where ``Costs.message`` is above 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.setting_error import SettingError

TOLERANCE = 1e-9
"""The fraction by which rounding alone may take sums of fractional activations above a limit."""

Limit = float | tuple[float, ...]
"""One number for all ranks, or one for each."""

LARGEST_FRACTION = 8.0
"""The largest limit that is read as a fraction; a larger one is an amount of memory."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory budget of each of the ``ranks``, in the unit of ``StageCosts.activation``.

    It holds activations, and also messages where ``holds_messages``.
    """

    ranks: tuple[float, ...]
    holds_messages: bool = True

    @property
    def turned_over(self) -> "Budget":
        """The same budget with the ranks counted from the other end."""
        return replace(self, ranks=self.ranks[::-1])

    def counted(self, costs: Costs) -> Costs:
        """Return ``costs`` as the budget counts them: with messages of size 0 where it holds none."""
        return costs if self.holds_messages else replace(costs, message=0.0)


def requested_budget(limit: Limit, ranks: int, microbatches: int, costs: Costs) -> Budget:
    """Return a requested ``limit`` as an amount of memory for each of the ``ranks``.

    Up to ``LARGEST_FRACTION`` a number is a fraction of what 1F1B keeps at most (``kept_by_1f1b``).  It
    limits activations alone, as in the papers.  A larger number is an amount in the unit of
    ``StageCosts.activation`` and holds activations and messages.  All ranks have numbers of one kind.
    """
    numbers = (limit,) * ranks if isinstance(limit, float | int) else tuple(limit)
    if not all(0 < number <= LARGEST_FRACTION for number in numbers):
        return Budget(numbers)
    whole = kept_by_1f1b(ranks, microbatches, costs)
    return Budget(tuple(number * whole for number in numbers), holds_messages=False)


def kept_by_1f1b(ranks: int, microbatches: int, costs: Costs) -> float:
    """Return the activations that 1F1B keeps on the rank that keeps most, with a W right after every I.

    Where all ranks have the same layers that is the first one, with those of ``ranks`` microbatches, or of
    all ``microbatches`` where these are fewer.  What an I takes counts once more.  Unlike ones run in the
    order of ``costs``.
    """
    cut = costs.merged(ranks)
    if not costs.are_alike:
        return max(
            _most_in_a_row(cut, rank, min(ranks - rank, microbatches), microbatches) for rank in range(ranks)
        )
    return max(
        min(ranks - rank, microbatches) * stage.activation + stage.growth(Kind.I)
        for rank, stage in enumerate(cut.stages)
    )


def _most_in_a_row(costs: Costs, stage: int, length: int, microbatches: int) -> float:
    """Return the most that ``stage`` keeps of ``length`` microbatches in a row."""
    sizes = [costs.kept(Action(stage, Kind.F, microbatch)) for microbatch in range(microbatches)]
    most = max(math.fsum(sizes[first : first + length]) for first in range(microbatches - length + 1))
    return most + max(costs.growth(Action(stage, Kind.I, microbatch)) for microbatch in range(microbatches))


def least_limits(
    costs: Costs, placement: Placement, microbatches: int = SENDS_AHEAD + 1
) -> tuple[float, ...]:
    """Return the lowest limit of each rank, in the unit of ``StageCosts.activation``.

    It holds one microbatch's activations of all the rank's stages, as the backward of the first of them waits
    for the forward of the last, the memory of each backward while the forwards before it wait for theirs, and
    ``least_messages``, which are as many for more ``microbatches``.  No order keeps less, and the one that
    does one microbatch at a time keeps no more.
    """
    cut = costs.merged(placement.stages)
    return tuple(
        _least_activations([cut.stages[stage] for stage in placement.stages_of(rank)])
        + least_messages(placement, rank, microbatches) * cut.message
        for rank in range(placement.ranks)
    )


def _least_activations(stages: Sequence[StageCosts]) -> float:
    """Return the most that a rank keeps of one microbatch alone, by the backwards that take less."""
    sizes = [stage.activation for stage in stages]
    takes = (
        math.fsum([*sizes[: at + 1], min(stage.growth(Kind.I), stage.growth(Kind.B))])
        for at, stage in enumerate(stages)
    )
    return max(math.fsum(sizes), *takes)


def least_messages(placement: Placement, rank: int, microbatches: int) -> int:
    """Return the message buffers (``simulate.most_buffers``) that ``rank`` holds at least, in any order.

    These are the sent messages that may be unfinished, and the one that an action takes.
    """
    per_microbatch = _sent(placement, rank)
    return min(microbatches * per_microbatch, SENDS_AHEAD + 1) + (per_microbatch > 0)


@lru_cache(maxsize=4096)
def _sent(placement: Placement, rank: int) -> int:
    """Return how many messages of each microbatch ``rank`` sends."""
    edges = (
        edge
        for stage in placement.stages_of(rank)
        for edge in range(max(0, stage - 1), min(stage + 1, placement.stages - 1))
    )
    # Edge n joins the stages n and n + 1.  A stage sends a message of each microbatch over each of its edges.
    return sum(not placement.is_local(edge) for edge in edges)


def without_messages(
    placement: Placement, microbatches: int, costs: Costs, limits: Sequence[float]
) -> tuple[float, ...]:
    """Return the most that every limit leaves for activations; all of it where a rank keeps none."""
    least_activations = least_limits(replace(costs, message=0.0), placement)
    return tuple(
        limit - least_messages(placement, rank, microbatches) * costs.message if least else limit
        for rank, (limit, least) in enumerate(zip(limits, least_activations, strict=True))
    )


def at_most(amount: float, limit: float) -> bool:
    """Whether ``limit`` holds ``amount``, up to rounding."""
    return amount <= limit * (1 + 2 * TOLERANCE)


class InfeasibleLimit(SettingError):
    """A memory limit that no schedule can keep; ``{rank}`` in the ``words`` stands for ``rank``."""

    def __init__(self, words: str = "", rank: int = 0) -> None:
        super().__init__(words.replace("{rank}", str(rank)))
        self._words, self._rank = words, rank

    def turned_over(self, ranks: int) -> "InfeasibleLimit":
        """Return the error for ``ranks`` that count from the other end."""
        return type(self)(self._words, ranks - 1 - self._rank)
