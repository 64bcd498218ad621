"""Schedules by name, ready to be timed and to tell their memory; each is built once."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_pp_ext.planner.activations import InFlight
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.compile import TRIALS, compile_schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.replay import Replay

NO_PIPELINE = "none"
"""What the order of a single rank is called, which does one microbatch after the other."""

FLUSH_FREE = PIPEDREAM, TWO_VERSIONS = "pipedream", "pipedream-2bw"
"""1F1B's order without an end: a stage updates its weights as its own backwards come in."""


_LARGEST_FRACTION = 8.0


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule: when its ranks end, and what they have in flight."""

    replay: Replay
    in_flight: InFlight

    @classmethod
    def of(cls, schedule: Schedule) -> "Program":
        """``schedule``, prepared."""
        return cls(Replay(schedule), InFlight(schedule))


def placement_of(name: str, ranks: int, chunks: int) -> Placement:
    """Where schedule ``name`` puts ``ranks`` x ``chunks`` stages; ValueError for an unknown name."""
    if ranks == 1 or name in FLUSH_FREE:
        return linear(ranks)
    return Placement(catalog.entry(name).shape, ranks, chunks)


@lru_cache(maxsize=512)
def program(name: str, ranks: int, microbatches: int, chunks: int) -> Program:
    """Schedule ``name``; ValueError for sizes that it cannot be built for."""
    if ranks == 1:
        return Program.of(_alone(microbatches))
    if name in FLUSH_FREE:
        name = "1f1b"
    # Not ``catalog.build``, which proves once more what the tests have proved of every family.
    entry = catalog.entry(name)
    return Program.of(entry.builder(ranks, microbatches, *([chunks] if entry.any_chunks else [])))


def compiled(
    ranks: int, microbatches: int, costs: Costs, limit: float, trials: int = TRIALS
) -> tuple[Program, Placement]:
    """The shortest order found within ``limit`` (``flex``), and where it puts the stages.

    ``limit`` is as for ``in_bytes``.
    """
    limit = in_bytes(limit, ranks, microbatches, costs)
    schedule = compile_schedule(ranks, microbatches, costs, limit, trials=trials).timeline.schedule
    return Program.of(schedule), schedule.placement


def in_bytes(limit: float, ranks: int, microbatches: int, costs: Costs) -> float:
    """A limit of ``flex`` in bytes a rank; up to 8 it is a fraction of what 1F1B keeps on its first."""
    if limit > _LARGEST_FRACTION:
        return limit
    return limit * min(ranks, microbatches) * costs.merged(ranks).stages[0].activation


def _alone(microbatches: int) -> Schedule:
    order = [Action(0, kind, m) for m in range(microbatches) for kind in (Kind.F, Kind.B)]
    return Schedule(NO_PIPELINE, linear(1), microbatches, (tuple(order),))
