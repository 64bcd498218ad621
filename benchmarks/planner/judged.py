"""Published training runs with their estimates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step import error_band
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from reference.training_runs import PublishedRun, runs


@dataclass(frozen=True, slots=True)
class Judged:
    """A published run with its estimate, under ``schedule``."""

    run: PublishedRun
    kind: str
    estimate: Estimate
    schedule: str

    @property
    def ratio(self) -> float:
        """The estimated seconds of a step for each one measured."""
        assert self.run.seconds is not None
        return self.estimate.step_seconds / self.run.seconds

    @property
    def bytes(self) -> float:
        """The memory of the fullest rank, with the addition of the run's framework."""
        fullest = self.estimate.fullest
        weights = fullest.weights / describe(dict(self.run.model)).precision.weight_size
        return fullest.total + self.run.more_bytes * weights


def machine_of(run: PublishedRun, machine: System | None = None) -> System:
    """Return ``machine``, by default the shipped one that ``run`` was on, with the run's own links."""
    machine = machine or system.read(run.gpu)
    machine = replace(machine, network=_link(run.network, machine.network))
    if run.node is None:
        return machine
    # Collectives were measured on the shipped links.
    measured = {"all_reduce": (), "gather": (), "all_to_all": ()}
    return replace(machine, node=_link(run.node, machine.node), **measured)


def _link(rate: float | None, shipped: Link) -> Link:
    return shipped if rate is None else Link(rate, shipped.latency_seconds)


def judged(run: PublishedRun, machine: System | None = None, starts: int = 0) -> Judged:
    """Estimate ``run``, on ``machine`` in place of the shipped system if one is given.

    An action takes so many ``starts`` of a kernel more.
    """
    job = describe(dict(run.model)).changed(**run.framework, action_starts=starts)
    machine = machine_of(run, machine)
    request = for_world(asked_of(job), run.gpus)
    estimate = estimate_request(job, machine, request)
    return Judged(run, error_band.kind_of(job, machine, run.gpus), estimate, request.schedule)


@cache
def all_judged() -> tuple[Judged, ...]:
    """Return every run that can be described, with its estimate."""
    return tuple(map(judged, runs()))


def timed(every: Iterable[Judged]) -> list[Judged]:
    """Return the runs whose source has the time of a step."""
    return [result for result in every if result.run.seconds]


def by_kind(every: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return the runs of each kind that has any, in the order of ``error_band.KINDS``."""
    kinds: dict[str, list[Judged]] = {kind: [] for kind in error_band.KINDS}
    for result in every:
        kinds[result.kind].append(result)
    return {kind: rows for kind, rows in kinds.items() if rows}


def error(every: Sequence[Judged]) -> float:
    """Return the mean of the absolute relative errors."""
    return mean(abs(result.ratio - 1) for result in every)


def grouped[Key](every: Iterable[Judged], key: Callable[[Judged], Key]) -> Mapping[Key, list[Judged]]:
    """Return the runs of each key, in the order in which the keys come up."""
    groups = defaultdict(list)
    for result in every:
        groups[key(result)].append(result)
    return groups
