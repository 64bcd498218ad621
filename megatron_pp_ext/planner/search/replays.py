"""Replays of candidates, with the layout that makes the step of each shortest where layouts are searched.

Where activations may wait on the host, a candidate that the memory keeps out is tried with them there: the
plans of ``features.offload`` make no step longer, and a smaller share of them is the better one.  Layers are
spread for it as for any other, within the memory that copies leave free.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.candidate_cuts import CandidateCuts, least_in_order
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import Estimate, Pace, RankMemory, estimate, memory, pace
from megatron_pp_ext.planner.step.host_copies import kept_on_host, offloaded, parts_on_device
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO

IMPROVED = 0.1
"""The part of a step by which another layout is taken to shorten it at most: longer ones are not improved."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of activations on the host that are tried, the first that fits."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was replayed, with its estimate."""

    candidate: Candidate
    estimate: Estimate


class _Timed(NamedTuple):
    """A candidate with its stages, what its fullest rank needs at least, and the seconds of its step."""

    candidate: Candidate
    work: Workload
    least: RankMemory
    pace: Pace


_Estimating = Callable[[_Timed, float, Callable[[float], float]], Evaluated | RankMemory | None]
"""What returns an estimate within a limit, as ``Replays.replayed`` does."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays candidates; where ``is_uneven``, layers are spread over the stages as suits each best.

    ``offloads`` says whether activations may wait on the host.
    """

    workloads: Workloads
    margin: float
    is_uneven: bool = False
    offloads: bool = False

    def replayed(
        self, candidate: Candidate, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or what its fullest rank needs if that is above ``limit``.

        ``room`` returns the bytes in which a step of so many seconds would be worth having.  None stands for
        a candidate that was timed and needs more.  Other layouts than the one that it is tried with first
        are tried only where a step that is shorter by ``IMPROVED`` would be worth having.
        """
        found = self._on_device(candidate, limit, room)
        can_leave = self.offloads and candidate.pipeline > 1 and catalog.abilities(candidate.schedule).flushes
        if can_leave and isinstance(found, RankMemory):
            away = self._on_host(replace(candidate, offload=1.0), limit, room)
            return found if isinstance(away, RankMemory) else away or found
        return found

    def _on_device(
        self, candidate: Candidate, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Do what ``replayed`` does, with all activations on the device."""
        if not self.is_uneven or candidate.pipeline == 1:
            work = self.workloads.work(candidate)
            least = least_in_order(candidate, work, self.margin)
            if least.total > limit:
                return least
            return self._estimated(self._timed(candidate, work, least), limit, room)
        stages = self.workloads.stages(candidate, candidate.placement)
        cuts = CandidateCuts(candidate, stages, self.workloads, self.margin, limit)
        return self._laid_out(cuts, room, self._estimated)

    def _on_host(
        self, candidate: Candidate, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Do what ``replayed`` does, with the smallest share on the host with which the candidate fits.

        A plan for a few microbatches says what copies leave on each rank, as in ``short_memory``, so that
        whole steps are planned only in layouts that may fit.  Copies shorten no step, so that what is too
        slow without a memory limit needs no plan at all.
        """
        fewer = min(2 * candidate.pipeline, candidate.microbatches)
        short = candidate.request(fewer)
        sizes = candidate.schedule, candidate.microbatches
        if not self.is_uneven:
            work = self.workloads.work(candidate)
            if not room(pace(work, order_of(candidate), *sizes).step_seconds):
                return None
            order = Prepared(offloaded(work, short, AUTO))
            least = max(memory(work, order, *sizes, self.margin), key=lambda rank: rank.total)
            if least.total > limit:
                return least
            return self._with_copies(self._timed(candidate, work, least), limit, room)
        stages = self.workloads.stages(candidate, candidate.placement)
        even = CandidateCuts(candidate, stages, self.workloads, self.margin, limit).work(stages.start)
        paced = pace(even, order_of(candidate), *sizes)
        mean = self.workloads.mean(candidate, candidate.placement)
        mean_least = mean.memory(candidate.microbatches, self.margin, may_leave=True)
        if mean_least.total > room(paced.step_seconds * (1 - IMPROVED)):
            return None
        left = parts_on_device(even, short, order_of(candidate, fewer))
        cuts = CandidateCuts(candidate, stages, self.workloads, self.margin, limit, left)
        return self._laid_out(cuts, room, self._with_copies)

    def _laid_out(
        self, cuts: CandidateCuts, room: Callable[[float], float], estimated: _Estimating
    ) -> Evaluated | RankMemory | None:
        """Return what ``estimated`` returns for the layout of ``cuts`` whose step is shortest."""
        limit = cuts.limit
        # Cuts differ little in what all ranks need together, and most candidates end here.
        mean = cuts.mean()
        if mean.total > limit:
            return mean
        start = cuts.fitted()
        least = cuts.least(start or cuts.stages.start)
        if least.total > limit:
            return least
        timed = self._cut(cuts, start or cuts.stages.start)
        if start and timed.least.total <= room(timed.pace.step_seconds * (1 - IMPROVED)):
            other = self._cut(cuts, cuts.shortened(start))
            if other.pace.step_seconds < timed.pace.step_seconds:
                evaluated = estimated(other, limit, room)
                if isinstance(evaluated, Evaluated):
                    return evaluated
        return estimated(timed, limit, room)

    def _with_copies(self, timed: _Timed, limit: float, room: Callable[[float], float]) -> Evaluated | None:
        """Return the candidate with the smallest share on the host with which it fits, if any."""
        candidate, work = timed.candidate, timed.work
        most = min(limit, room(timed.pace.step_seconds))
        if timed.least.total > most:
            return None
        request, sizes = (
            candidate.request(candidate.microbatches),
            (candidate.schedule, candidate.microbatches),
        )

        def with_host(share: float) -> Evaluated | None:
            copied = offloaded(work, request, share)
            estimated = estimate(work, Prepared(copied), *sizes, self.margin)
            if estimated.fullest.total > most:
                return None
            host = kept_on_host(work, copied)
            return Evaluated(replace(candidate, offload=share), replace(estimated, host_bytes=host))

        # What does not fit with all that leaves for free is given up: other plans take long to make.
        free = Prepared(offloaded(work, request, AUTO))
        if max(rank.total for rank in memory(work, free, *sizes, self.margin)) > most:
            return None
        return next(filter(None, map(with_host, SHARES)), None)

    def _cut(self, cuts: CandidateCuts, cut: Cut) -> _Timed:
        return self._timed(cuts.laid_out(cut), cuts.work(cut), cuts.least(cut))

    def _timed(self, candidate: Candidate, work: Workload, least: RankMemory) -> _Timed:
        order, sizes = order_of(candidate), (candidate.schedule, candidate.microbatches)
        return _Timed(candidate, work, least, pace(work, order, *sizes))

    def _estimated(
        self, timed: _Timed, limit: float, room: Callable[[float], float]
    ) -> Evaluated | RankMemory | None:
        """Return the candidate with its estimate, or what ``replayed`` returns instead.

        The messages of a whole order take longer to count than its seconds, and are counted last.
        """
        candidate = timed.candidate
        if timed.least.total > room(timed.pace.step_seconds):
            return None
        sizes = candidate.schedule, candidate.microbatches, self.margin
        estimated = estimate(timed.work, order_of(candidate), *sizes, timed.pace)
        return Evaluated(candidate, estimated) if estimated.fullest.total <= limit else estimated.fullest
