"""Offloading in the planner: what ranks keep on device and host, and the smallest share that fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import Candidate, Choice, Variants
from megatron_pp_ext.planner.search.replays import (
    IMPROVED,
    CandidateCuts,
    Evaluated,
    Replays,
    Timed,
    order_of,
    step_of,
)
from megatron_pp_ext.planner.step.estimate import RankMemory
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Addition, Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.simulate import simulate

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.estimate import Estimate


class Offloaded(Addition):
    """The seconds of copies, and the activations that stay on the device."""

    def costs(self, work: "Workload", costs: Costs) -> Costs:
        """See ``Addition``: a copy is as large as the activations of a forward.

        ValueError for a system that describes no host.
        """
        if work.job.pipeline.pipeline_offload is None:
            return costs
        host = work.system.host_beside_others
        if host is None:
            raise ValueError(
                f"system {work.system.name} describes no host, which --pipeline-offload needs: give it host"
            )
        rate, copied = host.bytes_per_second, zip(costs.stages, work.parts, strict=True)
        stages = tuple(replace(stage, copy=part.after_forward / rate) for stage, part in copied)
        return replace(costs, stages=stages)

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: copies take no memory of their own on the device."""
        if not schedule.copies:
            return peaks
        return tuple(map(min, peaks, kept_on_device(work, schedule)))

    def completed(self, estimate: "Estimate", work: "Workload", schedule: Schedule) -> "Estimate":
        """See ``Addition``: the host memory of activations."""
        if not schedule.copies:
            return estimate
        return replace(estimate, host_bytes=simulate(schedule, work.costs).peak_on_host)

    def lines(self, estimate: "Estimate") -> Iterator[str]:
        if estimate.host_bytes:
            yield f"on the host: {max(estimate.host_bytes) / 1e9:.2f} GB of the rank with most there"


def kept_on_device(work: "Workload", schedule: Schedule) -> tuple[float, ...]:
    """Return the most bytes of activations that each rank keeps on its device."""
    return simulate(schedule, work.costs).peak_activations


SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of activations on the host that are tried, the first that fits."""


def choice(share: float) -> Choice:
    """Return the choice of a candidate with this ``share`` of its activations on the host."""
    word = f"host{share:.0%}".rstrip("%")
    return Choice(word, (("pipeline_offload", f"{share:g}"),), (("offload", share),))


def offloaded(work: Workload, request: Request, share: float | str) -> Schedule:
    """Return the schedule of ``request`` for ``work`` with this ``share`` of activations on the host."""
    with_copies = request.with_option(OffloadRequest(share))
    return make(with_copies, CostModel.fixed(work.costs), is_proved=True).schedule


def parts_on_device(work: Workload, request: Request, order: Prepared) -> tuple[float, ...]:
    """Return the part of each rank's most bytes of activations that copies of all that can leave keep there.

    ``order`` belongs to ``request``, which has no copies.  Nearly the same parts stay under other layouts of
    the same stages.
    """
    copied = offloaded(work, request, AUTO)
    logits = work.head.activation if work.head else 0.0
    before, after = order.in_flight.peaks(work.parts, logits), kept_on_device(work, copied)
    return tuple(min(1.0, staying / most) for staying, most in zip(after, before, strict=True))


@dataclass(frozen=True, slots=True)
class HostReplays:
    """Replays candidates, as ``replays`` does, with activations on the host.

    Plans of copies make no step longer, and a smaller share of them is the better one.  Layers are spread as
    for any other candidate, within the memory that copies leave free.
    """

    replays: Replays

    def replayed(
        self, candidate: Candidate, limit: float, headroom: Callable[[float], float]
    ) -> Evaluated | None:
        """Return the candidate with the smallest share on the host with which it fits, if any.

        A plan for a few microbatches has the activations that stay on each rank, as in ``short_memory``.  So
        whole steps are planned only in layouts that may fit.  Copies shorten no step, so that what is too
        slow without a memory limit needs no plan at all.
        """
        replays, candidate = self.replays, replace(candidate, choice=choice(1.0))
        workloads, margin = replays.workloads, replays.margin
        fewer = min(2 * candidate.pipeline, candidate.microbatches)
        short = candidate.request(fewer)
        if not replays.is_uneven:
            work = workloads.work(candidate)
            if not headroom(step_of(candidate, work, margin).pace.step_seconds):
                return None
            order = Prepared(offloaded(work, short, AUTO))
            least = max(step_of(candidate, work, margin, order).memory(), key=lambda rank: rank.total)
            if least.total > limit:
                return None
            return self._fitted(replays.timed(candidate, work, least), limit, headroom)
        stages = workloads.stages(candidate, candidate.placement)
        even = CandidateCuts(candidate, stages, workloads, margin, limit).work(stages.start)
        paced = step_of(candidate, even, margin).pace
        mean = workloads.mean(candidate, candidate.placement)
        mean_least = mean.memory(candidate.microbatches, margin, of_largest=True)
        if mean_least.total > headroom(paced.step_seconds * (1 - IMPROVED)):
            return None
        parts = parts_on_device(even, short, order_of(candidate, fewer))
        cuts = CandidateCuts(candidate, stages, workloads, margin, limit, parts)
        fitted = replays.laid_out(cuts, headroom, self._fitted)
        return None if isinstance(fitted, RankMemory) else fitted

    def _fitted(self, timed: Timed, limit: float, headroom: Callable[[float], float]) -> Evaluated | None:
        """Return the candidate with the smallest of the ``SHARES`` with which it fits, if any."""
        candidate, work, margin = timed.candidate, timed.step.work, self.replays.margin
        most = min(limit, headroom(timed.seconds))
        if timed.least.total > most:
            return None
        request = candidate.request(candidate.microbatches)

        def with_host(share: float) -> Evaluated | None:
            copied = offloaded(work, request, share)
            estimated = step_of(candidate, work, margin, Prepared(copied)).estimate()
            if estimated.fullest.total > most:
                return None
            completed = Offloaded().completed(estimated, work, copied)
            return Evaluated(replace(candidate, choice=choice(share)), completed)

        # What does not fit with all that leaves for free is given up: other plans take long to make.
        free = Prepared(offloaded(work, request, AUTO))
        if max(rank.total for rank in step_of(candidate, work, margin, free).memory()) > most:
            return None
        return next(filter(None, map(with_host, SHARES)), None)


class OnHost(Variants):
    """Candidates with a share of their activations on the host."""

    arguments = ("pipeline_offload",)
    entries = ("offload",)
    label = ("host...", "the percentage of activations that wait on the host")

    def refuse(self, job: RequestedJob) -> None:
        if job.pipeline.pipeline_offload not in (None, AUTO):
            raise ValueError(
                f"--pipeline-offload is {job.pipeline.pipeline_offload}, but a search chooses a share "
                f"itself where memory asks for it: give {AUTO}, or ask mpp estimate"
            )

    def are_tried(self, job: Job) -> bool:
        return job.pipeline.pipeline_offload is not None

    def replayed(
        self, replays: "Replays", candidate: "Candidate", limit: float, headroom: Callable[[float], float]
    ) -> "Evaluated | None":
        # Most commands never come here.

        if candidate.pipeline == 1 or not catalog.abilities(candidate.schedule).flushes:
            return None
        return HostReplays(replays).replayed(candidate, limit, headroom)
