"""Rows of layers, a described model as one, and the shortest cut of a row under a schedule that is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from typing import NamedTuple, Protocol

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.stages import stage_parts
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.climb import Stages, fitted, levelled, shortened
from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.planner.step.estimate import RankMemory, StepModel
from megatron_pp_ext.planner.step.programs import Prepared
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.timing import CriticalPath, ScheduleTimer


class LayoutRow(Stages, Protocol):
    """A row of items, of which the stages of one schedule are cut."""

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""


type Seconds = tuple[float, float, float, float]
"""The seconds of F, I and W and, below 0, the saving of an I and a W together."""

NOTHING: Seconds = (0.0, 0.0, 0.0, 0.0)


def seconds_of(costs: StageCosts) -> Seconds:
    """Return the seconds of F, I and W in ``costs``, and minus the seconds that a B saves over I and W."""
    return costs.forward, costs.input_gradient, costs.weight_gradient, -costs.hidden


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers whose seconds add up, for stages that have the fewest layers in ``least``.

    ``front`` and ``back`` are the other seconds of the first and the last stage.  ``like`` has the
    times of messages.  ``totals`` returns the bytes that every rank needs under a cut.
    """

    layers: tuple[Seconds, ...]
    front: Seconds
    back: Seconds
    like: Costs
    placement: Placement
    least: Cut
    totals: Callable[[Cut], Sequence[float]]

    @property
    def items(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def seconds(self, stage: int, first: int, end: int) -> Seconds:
        """Return the seconds of ``stage`` if it has the layers first, ..., end - 1."""
        parts = [*self.layers[first:end]]
        parts += [self.front] if stage == 0 else []
        parts += [self.back] if stage == self.placement.stages - 1 else []
        forward, input_gradient, weight_gradient, saved = map(fsum, zip(NOTHING, *parts, strict=True))
        return forward, input_gradient, weight_gradient, saved

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``, whose activations are left out."""
        rows = (self.seconds(*position) for position in bounds(cut))
        stages = tuple(StageCosts(f, i, w, activation=0.0, hidden=min(-saved, w)) for f, i, w, saved in rows)
        return replace(self.like, stages=stages)


class Shortest(NamedTuple):
    """A cut with its makespan, and the makespan of the cut that it is compared with."""

    cut: Cut
    makespan: float
    before: float

    @property
    def gain(self) -> float:
        """The part of the makespan that the cut saves."""
        return 1 - self.makespan / self.before


def shortest(schedule: Schedule, row: LayoutRow, present: Cut, limit: float = 0.0) -> Shortest:
    """Return the cut of ``row`` whose pipeline is shortest under ``schedule``, as far as moves find it.

    They start from equally long stages, and from ``present``, with which the result is compared.  No rank
    needs more than ``limit`` bytes, or than the fullest one needs under ``present`` if that is more.
    """
    timer = ScheduleTimer(schedule)
    limit = max(limit, *row.totals(present))

    def replay(cut: Cut) -> CriticalPath:
        return timer.critical_path(row.costs(cut))

    def fits(cut: Cut) -> bool:
        return max(row.totals(cut)) <= limit

    starts = present, fitted(row, levelled(row, row.least), row.totals, limit)
    best = min(
        (
            shortened(row, start, schedule.microbatches, replay, fits)
            for start in dict.fromkeys(starts)
            if start is not None
        ),
        key=lambda climbed: climbed.value,
    )
    return Shortest(best.cut, best.value, replay(present).makespan)


FIRST, MIDDLE, LAST = range(3)
"""Where a stage is: it has the embedding, only layers, or the output layer and the loss."""


class StageSeconds:
    """The seconds of stages of ``model``, the parts of ``job``'s model.

    ``splits_head`` is whether all ranks split the head.  The items of a stage are layers, and multi-token
    prediction as the last item of the model.
    """

    def __init__(self, job: Job, model: ModelParts, splits_head: bool = False) -> None:
        self._job, self.model = job, model
        self._splits_head = splits_head
        self.layers = len(model.layers)
        self.prediction = "m" * job.model.mtp_num_layers
        self._known: dict[tuple[int, int, int], Seconds] = {}
        self._by_content: dict[tuple[object, ...], Seconds] = {}

    def of(self, role: int, first: int, end: int) -> Seconds:
        """Return the seconds of a stage in the place ``role`` with the items first, ..., end - 1."""
        key = role, first, end
        if key not in self._known:
            content = role, self._predicts(first, end), *map(id, self.model.layers[first:end])
            if content not in self._by_content:
                self._by_content[content] = self._counted(*key)
            self._known[key] = self._by_content[content]
        return self._known[key]

    def _predicts(self, first: int, end: int) -> bool:
        return first <= self.layers < end

    def _counted(self, role: int, first: int, end: int) -> Seconds:
        """Return the seconds of a stage at the front of three, between the others, or at the end."""
        layers, last = self.model.layers[first:end], self.model.layers[-1]
        count = len(layers)
        # Prediction has another layer like the model's last one.
        row = (last, *layers) if role == LAST else (*layers, last)
        counts = ((count, 1, 0), (0, count, 1), (1, 0, count))[role]
        predicting = role if self._predicts(first, end) else LAST if role < LAST else FIRST
        parts = stage_parts(
            self._job, replace(self.model, layers=row), counts, self._splits_head, predicting=predicting
        )
        return seconds_of(parts[role].costs())


def fewest(job: Job, placement: Placement) -> Cut:
    """Return the fewest layers of each stage of ``placement``.

    Only a stage that has the embedding or the loss does without a layer.  Where some layers of every stage
    are recomputed, every stage has them.
    """
    if job.memory.recomputes_first:
        return (job.memory.recomputed_together,) * placement.stages
    end = int(placement.splits_head)
    return (end, *[1] * (placement.stages - 2), end)


class ModelStages:
    """The stages of ``placement`` that can be cut from the model of ``job``, whose seconds are ``counted``.

    The items of a cut are the transformer layers, and all depths of multi-token prediction as one item after
    them.
    """

    def __init__(self, job: Job, stage_seconds: StageSeconds, placement: Placement) -> None:
        self._job, self._counted, self.placement = job, stage_seconds, placement
        self.layers, self._prediction = stage_seconds.layers, stage_seconds.prediction
        self.items = self.layers + bool(self._prediction)

    @cached_property
    def least(self) -> Cut:
        """The fewest items of each stage."""
        return fewest(self._job, self.placement)

    @cached_property
    def start(self) -> Cut:
        """The cut whose stages and ranks take equally long, as far as whole layers allow."""
        cut = levelled(self, self.least)
        # Where prediction cannot be trained there, it stays with the loss.
        return cut if self.can_be(cut) else levelled(self, (*self.least[:-1], max(1, self.least[-1])))

    def can_be(self, cut: Cut) -> bool:
        """Whether multi-token prediction, the last item, is in a stage where Megatron can train it."""
        at = self._predicting(cut)
        return at is None or at in layers.stages_for_prediction(self.placement)

    def layers_of(self, cut: Cut) -> Cut:
        """Return the transformer layers of each stage of ``cut``."""
        at = self._predicting(cut)
        return tuple(count - (stage == at) for stage, count in enumerate(cut))

    def layout_for(self, cut: Cut) -> str | None:
        """Return the layout with the place of multi-token prediction; None where it is with the loss."""
        return self.spelled(cut) if self._predicting(cut) not in (None, len(cut) - 1) else None

    def _predicting(self, cut: Cut) -> int | None:
        """Return the stage with multi-token prediction, the last item."""
        return max(stage for stage, count in enumerate(cut) if count) if self._prediction else None

    def seconds(self, stage: int, first: int, end: int) -> Seconds:
        """Return the seconds of F, I and W of ``stage`` if it has the items first, ..., end - 1."""
        role = FIRST if stage == 0 else LAST if stage == self.placement.stages - 1 else MIDDLE
        return self._counted.of(role, first, end)

    def layout(self, cut: Cut) -> str | None:
        """Return ``cut`` as --pipeline-model-parallel-layout; None where Megatron cuts so by itself."""
        return None if cut == self._by_itself else self.spelled(cut)

    def spelled(self, cut: Cut) -> str:
        """Return ``cut`` as --pipeline-model-parallel-layout."""
        letters = [*"t" * self.layers, *([self._prediction] if self._prediction else [])]
        stages = ["".join(letters[first:end]) for _, first, end in bounds(cut)]
        return layers.spelled([f"E{stages[0]}", *stages[1:-1], f"{stages[-1]}L"])

    def with_prediction(self, cut: Cut) -> Cut:
        """Return ``cut``, of layers alone, with multi-token prediction in the last stage if there is any."""
        return *cut[:-1], cut[-1] + bool(self._prediction)

    @cached_property
    def _by_itself(self) -> Cut | None:
        """The cut that Megatron makes without a layout; None where it cannot."""
        try:
            return self.with_prediction(tuple(layers.by_stage(self._job, self.placement.stages)))
        except ValueError:
            return None


_MACHINE = "h100"
"""The machine on which memory is counted, of which only comparisons between cuts are made."""


class ModelRow(ModelStages):
    """The layers of ``job``'s model, whose parts are ``model``, for a schedule that is called ``name``."""

    def __init__(self, job: Job, model: ModelParts, data: int, schedule: Schedule, name: str) -> None:
        self._model, self._data = model, data
        self._order, self._name = Prepared(schedule), name
        splits_head = schedule.placement.splits_head
        stage_seconds = StageSeconds(job, model, splits_head)
        super().__init__(job, stage_seconds, schedule.placement)

    def costs(self, cut: Cut) -> Costs:
        """Return the costs of the stages of ``cut``."""
        return without_messages(self._work(cut).costs)

    def totals(self, cut: Cut) -> Sequence[float]:
        """Return the bytes that every rank needs; infinite where ``cut`` cannot be built."""
        if not self.can_be(cut):
            return [float("inf")] * self.placement.ranks
        return [rank.total for rank in self._memory(cut)]

    def capacity(self, cut: Cut, free: float) -> float:
        """Return the bytes of a device that has ``free`` ones left for a step by the state under ``cut``.

        The rank with most state, that is weights, gradients and optimizer, leaves the fewest.
        """
        ranks = self._memory(cut)
        return free + max(
            rank.total - rank.activations - rank.messages - rank.loss - rank.margin for rank in ranks
        )

    def _memory(self, cut: Cut) -> Sequence[RankMemory]:
        microbatches = self._order.timer.schedule.microbatches
        return StepModel(self._work(cut), self._order, self._name, microbatches).memory()

    def _work(self, cut: Cut) -> Workload:
        job = self._job.changed(pipeline_model_parallel_layout=self.spelled(cut))
        return work_of(job, self._model, self._data, self.placement)


def work_of(job: Job, model: ModelParts, data: int, placement: Placement) -> Workload:
    """Return the workload of ``job`` in the stages that it describes."""
    return Workload(job, system.read(_MACHINE), placement, data, model=model)


def without_messages(costs: Costs) -> Costs:
    """Return ``costs`` with messages that take no time, whose seconds are none in operations."""
    shared = costs.head and replace(costs.head, hidden=0.0, sums=0.0)
    return replace(costs, hop=0.0, head=shared)
