"""Replays of candidates with the smallest share of their activations on the host with which they fit.

The plans of ``free_plans`` make no step longer, and a smaller share of them is the better one.  Layers are
spread as for any other candidate, within the memory that copies leave free.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.offload.options import Offload
from megatron_pp_ext.features.offload.planner.estimates import Offloaded, kept_on_device
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.candidate_cuts import CandidateCuts
from megatron_pp_ext.planner.search.replays import IMPROVED, Evaluated, Replays, Timed
from megatron_pp_ext.planner.search.variants import Choice
from megatron_pp_ext.planner.search.workloads import order_of
from megatron_pp_ext.planner.step.estimate import RankMemory, estimate, memory, pace
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.names import AUTO

SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of activations on the host that are tried, the first that fits."""


def choice(share: float) -> Choice:
    """Return the choice of a candidate with this ``share`` of its activations on the host."""
    word = f"host{share:.0%}".rstrip("%")
    return Choice(word, (("pipeline_offload", f"{share:g}"),), (("offload", share),))


def offloaded(work: Workload, request: Request, share: float | str) -> Schedule:
    """Return the schedule of ``request`` for ``work`` with this ``share`` of activations on the host."""
    with_copies = request.with_option(Offload(share))
    return make(with_copies, lambda stages, splits_head: work.costs, is_proved=True).schedule


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
    """Replays candidates, as ``replays`` does, with activations on the host."""

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
        sizes = candidate.schedule, candidate.microbatches
        if not replays.is_uneven:
            work = workloads.work(candidate)
            if not headroom(pace(work, order_of(candidate), *sizes).step_seconds):
                return None
            order = Prepared(offloaded(work, short, AUTO))
            least = max(memory(work, order, *sizes, margin), key=lambda rank: rank.total)
            if least.total > limit:
                return None
            return self._fitted(replays.timed(candidate, work, least), limit, headroom)
        stages = workloads.stages(candidate, candidate.placement)
        even = CandidateCuts(candidate, stages, workloads, margin, limit).work(stages.start)
        paced = pace(even, order_of(candidate), *sizes)
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
        candidate, work, margin = timed.candidate, timed.work, self.replays.margin
        most = min(limit, headroom(timed.pace.step_seconds))
        if timed.least.total > most:
            return None
        request = candidate.request(candidate.microbatches)
        sizes = candidate.schedule, candidate.microbatches

        def with_host(share: float) -> Evaluated | None:
            copied = offloaded(work, request, share)
            estimated = estimate(work, Prepared(copied), *sizes, margin)
            if estimated.fullest.total > most:
                return None
            completed = Offloaded().completed(estimated, work, copied)
            return Evaluated(replace(candidate, choice=choice(share)), completed)

        # What does not fit with all that leaves for free is given up: other plans take long to make.
        free = Prepared(offloaded(work, request, AUTO))
        if max(rank.total for rank in memory(work, free, *sizes, margin)) > most:
            return None
        return next(filter(None, map(with_host, SHARES)), None)
