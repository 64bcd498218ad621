"""Slots of memory for a rank's work: as many as its stages have microbatches in flight at once.

A CUDA graph computes in fixed memory.  A rank that captures its layers once for each slot can replay them in
any order of microbatches, forwards and backwards, as long as no two microbatches have a slot at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one rank's step, which all its stages share.

    ``by_unit`` is (stage, microbatch) -> the number of its slot, from 0 on, of ``count`` in all.
    """

    by_unit: Mapping[tuple[int, int], int]
    count: int

    @classmethod
    def of(cls, steps: Iterable[Sequence[Action]]) -> "Slots":
        """Give each stage's microbatch the lowest slot that is free from its F to the last of its I and W.

        ``steps`` are a rank's, in order; what stands in one step runs at once.  No fewer slots would do:
        intervals sorted by their starts get as few as overlap anywhere.
        """
        steps = [[action for action in step if action.kind in OF_STAGES] for step in steps]
        ends = {(stage, microbatch): at for at, step in enumerate(steps) for stage, _, microbatch in step}
        by_unit: dict[tuple[int, int], int] = {}
        free: set[int] = set()
        count = 0
        for at, step in enumerate(steps):
            for stage, kind, microbatch in step:
                if kind is Kind.F:
                    slot = min(free, default=count)
                    free.discard(slot)
                    count = max(count, slot + 1)
                    by_unit[stage, microbatch] = slot
            free |= {by_unit[stage, unit] for stage, _, unit in step if ends[stage, unit] == at}
        return cls(by_unit, count)
