"""Schedules by name, ready to be timed and to tell their memory; each is built once."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_pp_ext.compiler.compile import TRIALS, compile_schedule
from megatron_pp_ext.compiler.limits import asked_for
from megatron_pp_ext.planner.step.activation_peaks import InFlight
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.replay import Replay
from megatron_pp_ext.schedule.simulate import peak_messages

NO_PIPELINE = "none"
"""What the order of a single rank is called, which does one microbatch after the other."""

FLUSH_FREE = PIPEDREAM, TWO_VERSIONS = "pipedream", "pipedream-2bw"
"""1F1B's order without an end: a stage updates its weights as its own backwards come in."""


@dataclass(frozen=True)
class Program:
    """A schedule: when its ranks end, what they have in flight, and how many messages wait at most."""

    replay: Replay
    in_flight: InFlight

    @classmethod
    def of(cls, schedule: Schedule) -> "Program":
        """``schedule``, prepared."""
        return cls(Replay(schedule), InFlight(schedule))

    @cached_property
    def peak_messages(self) -> tuple[int, ...]:
        """The most message buffers that each rank holds at one time."""
        return peak_messages(self.replay.schedule)


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

    ``limit`` is as for ``schedule.limits.asked_for``.
    """
    limit, counted = asked_for(limit, ranks, microbatches, costs)
    schedule = compile_schedule(ranks, microbatches, counted, limit, trials=trials).timeline.schedule
    return Program.of(schedule), schedule.placement


def _alone(microbatches: int) -> Schedule:
    order = [Action(0, kind, m) for m in range(microbatches) for kind in (Kind.F, Kind.B)]
    return Schedule(NO_PIPELINE, linear(1), microbatches, (tuple(order),))
