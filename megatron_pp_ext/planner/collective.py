"""Collectives that a rank calls while it is rehearsed, which take no time there."""

from typing import NamedTuple

from megatron_pp_ext.costs.system import System


class Collective(NamedTuple):
    """A collective within an action of a chunk, over a group of ``ranks`` ranks that are ``stride`` apart.

    ``kind`` is that of the action.  ``operation`` is ``all_reduce``, ``gather`` (also for a reduce-scatter)
    or ``all_to_all``.  ``size`` is the bytes of the whole tensor.
    """

    chunk: int
    kind: str
    operation: str
    size: int
    ranks: int
    stride: int

    def seconds(self, system: System) -> float:
        """Return how long every rank of the group waits for it."""
        take = {
            "all_reduce": system.all_reduce_seconds,
            "gather": system.gather_seconds,
            "all_to_all": system.all_to_all_seconds,
        }
        return take[self.operation](self.size, self.ranks, self.stride)
