"""Replays of candidates, with the layout that makes the step of each shortest where layouts are searched.

Where activations may wait on the host, a candidate that the memory keeps out is tried with them there: the
plans of ``schedule.offload`` make no step longer, and a smaller share of them is the better one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_pp_ext.planner.layout.cut import Cut
from megatron_pp_ext.planner.search.candidate import Candidate
from megatron_pp_ext.planner.search.candidate_cuts import CandidateCuts, least_in_order
from megatron_pp_ext.planner.search.workloads import Workloads, order_of
from megatron_pp_ext.planner.step.estimate import Estimate, Pace, RankMemory, estimate, pace
from megatron_pp_ext.planner.step.host_copies import kept_on_host
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.offload import with_share

IMPROVED = 0.1
"""The part of a step by which another layout is taken to shorten it at most: longer ones are not improved."""

SHARES = (0.25, 0.5, 0.75)
"""The shares of activations on the host that are tried, beside all of them."""


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
            return self._on_host(replace(candidate, offload=1.0), limit, room) or found
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
        # Cuts differ little in what all ranks need together, and most candidates end here.
        mean = cuts.mean()
        if mean.total > limit:
            return mean
        start = cuts.fitted()
        least = cuts.least(start or stages.start)
        if least.total > limit:
            return least
        timed = self._cut(cuts, start or stages.start)
        if start and timed.least.total <= room(timed.pace.step_seconds * (1 - IMPROVED)):
            other = self._cut(cuts, cuts.shortened(start))
            if other.pace.step_seconds < timed.pace.step_seconds:
                evaluated = self._estimated(other, limit, room)
                if isinstance(evaluated, Evaluated):
                    return evaluated
        return self._estimated(timed, limit, room)

    def _on_host(
        self, candidate: Candidate, limit: float, room: Callable[[float], float]
    ) -> Evaluated | None:
        """Return the candidate with the smallest share on the host with which it fits, if any.

        Its layers are spread as evenly as can be.
        """
        if self.is_uneven:
            stages = self.workloads.stages(candidate, candidate.placement)
            cuts = CandidateCuts(candidate, stages, self.workloads, self.margin, limit)
            candidate, work = cuts.laid_out(stages.start), cuts.work(stages.start)
        else:
            work = self.workloads.work(candidate)
        order, sizes = order_of(candidate), (candidate.schedule, candidate.microbatches)
        paced = pace(work, order, *sizes)
        most = min(limit, room(paced.step_seconds))

        def with_host(share: float) -> Evaluated | None:
            schedule = with_share(order.timer.schedule, work.costs, share).schedule
            estimated = estimate(work, Prepared(schedule), *sizes, self.margin, paced)
            if estimated.fullest.total > most:
                return None
            host = kept_on_host(work, schedule)
            return Evaluated(replace(candidate, offload=share), replace(estimated, host_bytes=host))

        if not most or not (everything := with_host(1.0)):
            return None
        return next(filter(None, map(with_host, SHARES)), everything)

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
