"""The source of a training run's schedules, with a vocabulary that all ranks share where it is requested."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.compile import TRIALS, InfeasibleLimit
from megatron_pp_ext.compiler.limits import least_limits, of_each_rank
from megatron_pp_ext.job import offloading
from megatron_pp_ext.job.request import Request
from megatron_pp_ext.job.source import FreeBytes, Source, compile_once, source_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO, SHARED
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.schedule.vocabulary import share

_WORTH_SHARING = 0.01
"""The part of a step that sharing the vocabulary has to save before ``auto`` chooses it."""

_ATTEMPTS = 8
"""The limits tried for what a compiled schedule keeps beside its ranks' parts of the vocabulary."""


CostsOf = Callable[[int, bool], Costs]
"""(stages, whether ranks share the vocabulary) -> the costs of so many stages, to compile from."""


def requested_source(request: Request, costs_of: CostsOf) -> Source:
    """Return the source of ``request``'s schedules.

    Raises what ``compile_schedule`` raises where ``flex`` cannot keep its limit.
    """
    if request.vocabulary == SHARED:
        source = _sharing(request, costs_of)
    elif request.vocabulary == AUTO:
        source = _shorter_of_both(request, costs_of)
    else:
        source = source_of(request, lambda stages: costs_of(stages, False))
    if request.offload is None:
        return source
    placement = source.placement
    try:  # before the first step, since Megatron completes its flags, whose costs are then no longer known
        costs = costs_of(request.finest.stages, placement.shares_vocabulary)
    except ValueError:  # any model may train, also one that the estimate does not know
        costs = Costs.unit(placement)
    costs = costs.merged(placement.stages)
    if costs.has_parameters:  # then activations are counted in bytes too
        source = replace(source, kept_bytes=tuple(stage.activation for stage in costs.stages))

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return offloading.planned(source.build(microbatches, free_bytes), request, costs)[0]

    if catalog.abilities(request.schedule).measures_memory:
        return replace(source, build=build)
    ordinary, growth = offloading.planned(source.build(request.microbatches, None), request, costs)

    def build_once(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return ordinary if microbatches == request.microbatches else build(microbatches, free_bytes)

    note = f"copies to the host make steps {growth:.1%} longer by prediction" if growth > 5e-4 else ""
    notes = "; ".join(filter(None, (source.note, note)))
    return replace(source, build=build_once, known=source.known and ordinary, note=notes)


def _sharing(request: Request, costs_of: CostsOf) -> Source:
    """Return the source of ``request``'s schedules with a vocabulary that all ranks share."""
    if catalog.abilities(request.schedule).is_compiled:
        whole, costs = (costs_of(request.finest.stages, is_shared) for is_shared in (False, True))
        return compiled_beside_vocabulary(request, whole, costs)
    plain = source_of(request, lambda stages: costs_of(stages, True))

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        return share(lambda count: plain.build(count, free_bytes), microbatches)

    return replace(
        plain, placement=replace(plain.placement, shares_vocabulary=True), build=build, limits=None
    )


def _shorter_of_both(request: Request, costs_of: CostsOf) -> Source:
    """Return the source that shares the vocabulary, or the one that does not: the one with shorter steps."""
    alone = source_of(request, lambda stages: costs_of(stages, False))
    try:
        sources = alone, _sharing(request, costs_of)
    except InfeasibleLimit:
        return replace(alone, note="vocabulary not shared: the memory limit has no room for its parts")
    separate, shared = (
        simulate(
            source.build(request.microbatches, None),
            costs_of(request.finest.stages, bool(is_shared)).merged(source.placement.stages),
        ).makespan
        for is_shared, source in enumerate(sources)
    )
    gain = 1 - shared / separate
    if gain < _WORTH_SHARING:
        return replace(sources[0], note=f"vocabulary not shared: that would change a step by {-gain:+.1%}")
    return replace(sources[1], note=f"vocabulary shared: steps are {gain:.1%} shorter by prediction")


def compiled_beside_vocabulary(request: Request, whole: Costs, costs: Costs, trials: int = TRIALS) -> Source:
    """Return the source of ``flex`` or ``auto`` with a shared vocabulary, whose parts count in the limit.

    ``costs`` are those of the stages of ``request.finest`` without a vocabulary, and of the parts; each
    compilation tries ``trials`` orders.  A fraction as limit is one of what 1F1B keeps without sharing, where
    the stages cost what ``whole`` has.  Under ``auto`` each rank has the limit of what it has free.
    Raises what ``compile_schedule`` raises where ``flex`` cannot keep its limit.
    """
    is_auto = catalog.abilities(request.schedule).measures_memory
    limit, counted = (math.inf, costs) if is_auto else request.limited(whole)
    limits = of_each_rank(limit, request.ranks)
    compiler = _Beside(replace(costs, message=counted.message), request.ranks, trials)
    if is_auto:
        placement, ordinary = request.placement, None
    else:
        found, reason = [], InfeasibleLimit()
        for one in request.placements:
            try:
                found.append(compiler.within(limits, request.microbatches, one))
            except InfeasibleLimit as error:
                reason = error
        if not found:
            raise reason
        ordinary = min(found, key=lambda schedule: compiler.simulated(schedule).makespan)
        placement = replace(ordinary.placement, shares_vocabulary=False)

    def build(microbatches: int, free_bytes: FreeBytes | None) -> Schedule:
        if not is_auto:
            return compiler.within(limits, microbatches, placement)
        least = compiler.least(microbatches, placement)
        if free_bytes is None:
            return least
        free = tuple(map(max, compiler.needed(least), free_bytes()))
        return compiler.within(free, microbatches, placement)

    shared = replace(placement, shares_vocabulary=True)
    return Source(request.schedule, shared, build, known=ordinary)


@dataclass(frozen=True, slots=True)
class _Beside:
    """Compiles beside the ranks' parts of a vocabulary; ``costs`` are those of the finest stages."""

    costs: Costs
    ranks: int
    trials: int

    def within(self, limits: Sequence[float], microbatches: int, placement: Placement) -> Schedule:
        """Return a schedule that keeps every rank's limit, parts included; InfeasibleLimit without one.

        It is no longer than the one for the least limit on all ranks: more memory on some of them does not
        always lead the compiler to a shorter schedule.
        """
        own = self._keeping(limits, microbatches, placement)
        if len(set(limits)) == 1:
            return own
        with suppress(InfeasibleLimit):
            alike = self._keeping((min(limits),) * self.ranks, microbatches, placement)
            return min(own, alike, key=lambda one: self.simulated(one).makespan)
        return own

    def _keeping(self, limits: Sequence[float], microbatches: int, placement: Placement) -> Schedule:
        """Return a schedule that keeps ``limits``; InfeasibleLimit without one.

        What the parts keep is known once they are in the order, so the limits of the stages are lowered by
        what was too much.  The last try is the order that keeps least.
        """
        rooms = list(limits)
        with suppress(InfeasibleLimit):
            for _ in range(_ATTEMPTS):
                schedule = self._shared(rooms, microbatches, placement)
                excess = [needed - limit for needed, limit in zip(self.needed(schedule), limits, strict=True)]
                if max(excess) <= 0:
                    return schedule
                rooms = [room - max(0.0, more) for room, more in zip(rooms, excess, strict=True)]
                if min(rooms) <= 0:
                    break
        least = self.least(microbatches, placement)
        needs = self.needed(least)
        rank, limit, needed = max(
            zip(range(self.ranks), limits, needs, strict=True), key=lambda one: one[2] - one[1]
        )
        if needed <= limit:
            return least
        raise InfeasibleLimit(
            f"a memory limit of {limit:.6g} on rank {rank} has no room for the parts of a shared vocabulary, "
            f"with which the order that keeps least keeps {needed:.6g} there; raise --pipeline-memory-limit, "
            "or leave --pipeline-vocabulary out"
        )

    def least(self, microbatches: int, placement: Placement) -> Schedule:
        """Return the schedule whose stages keep least on every rank."""
        return self._shared(least_limits(self.costs, placement), microbatches, placement)

    def needed(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the memory of each rank."""
        return self.simulated(schedule).peak_memory

    def simulated(self, schedule: Schedule) -> Timeline:
        """Return the step of ``schedule``."""
        return simulate(schedule, self.costs.merged(schedule.placement.stages))

    def _shared(self, rooms: Sequence[float], microbatches: int, placement: Placement) -> Schedule:
        def build(count: int) -> Schedule:
            return compile_once(count, self.costs, rooms, [placement], self.trials)

        return share(build, microbatches)
