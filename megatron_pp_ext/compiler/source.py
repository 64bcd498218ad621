"""The schedules of a run: what ``make`` returns, for any number of microbatches and all with one placement.

The placement is fixed with the flags, since the model is built by it.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement

_FEWER = 8
"""The part of the trials that a compiled schedule has for another number of microbatches than the ordinary.

Batches of lengths that vary have a new number at every other step, and all ranks wait for its schedule.  It
depends on the request alone, as that of an ordinary step does, so that all ranks have the same one.
"""


class Source:
    """Makes the schedules of ``request``, each once.

    The costs that decide on them are asked for when the source is made: later Megatron completes its flags,
    and they would then ask for what the cost model does not know.  Raises what ``make`` raises for an
    ordinary step.
    """

    def __init__(self, request: Request, costs: CostModel) -> None:
        self._finest, self._model = request.finest, CostModel(costs.of)
        self._costs = self._model.merged_from(request.finest)
        self._first = make(request, self._costs)
        self.request = request
        self._can = catalog.abilities(request.schedule)
        # A compiler may have chosen among placements, and a feature whether the head is split.
        self.resolved = replace(
            request,
            placements=(replace(self.placement, splits_head=False),),
            splits_head=self.placement.splits_head,
            ordinary=request.microbatches,
        )
        self._steps: dict[tuple[object, ...], Schedule] = {(request.microbatches, None, ()): self.ordinary}

    @property
    def kept_bytes(self) -> tuple[float, ...]:
        """The bytes that a forward of each stage keeps; none where the schedule needed no costs in bytes."""
        costs = self._model.known(replace(self._finest, splits_head=self.placement.splits_head))
        if costs is None or not costs.has_parameters:
            return ()
        return tuple(stage.activation for stage in costs.merged(self.placement.stages).stages)

    @property
    def costs(self) -> Costs:
        """The costs of the stages; what ``costs`` raises where the schedule has not asked for them."""
        return self._costs.of(self.placement)

    @property
    def name(self) -> str:
        return self.request.schedule

    @property
    def placement(self) -> Placement:
        return self.ordinary.placement

    @property
    def ordinary(self) -> Schedule:
        """The schedule of an ordinary step, under ``auto`` of the first one."""
        return self._first.schedule

    @property
    def note(self) -> str:
        """A note for users on the ordinary schedule; empty for none."""
        return self._first.note or self._first.about

    def schedule(
        self, microbatches: int, free: Sequence[float] | None = None, options: tuple[Option, ...] = ()
    ) -> Schedule:
        """Return the schedule of a step with so many ``microbatches``.

        ``free`` are the bytes that each rank has left for a step, of which ``auto`` takes as many as it can
        use; None in the first training step, before whose end the optimizer has not allocated its state.
        ``options`` are those that only the built model decides (``Request.with_option``).  A schedule that
        never flushes shows only its order and the microbatches in flight.
        """
        if not self._can.flushes:
            microbatches = max(microbatches, self.placement.ranks)
        free_bytes = None if free is None else tuple(free)
        key = microbatches, free_bytes, options
        if key not in self._steps:
            trials = self.request.trials
            request = replace(
                self.resolved,
                microbatches=microbatches,
                free=free_bytes,
                trials=trials if microbatches == self.request.microbatches else trials // _FEWER,
            )
            for option in options:
                request = request.with_option(option)
            self._steps[key] = make(request, self._costs).schedule
        return self._steps[key]
