"""Steps whose microbatches are of unlike length: units are cut from all of them, and planned each time.

All ranks of a pipeline know the lengths before the step (``lengths.megatron.agreement``), and find the same
plan.  The forward step reads the microbatches in the order in which their first units run, and the losses are
handed over in the order of the data.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import evaluation
from megatron_pp_ext.features.lengths.length_costs import OVERHEAD
from megatron_pp_ext.features.lengths.megatron.agreement import Agreed, Documents, agree, of_all
from megatron_pp_ext.features.lengths.megatron.known_shapes import size_of
from megatron_pp_ext.features.lengths.megatron.read_ahead import read_documents
from megatron_pp_ext.features.lengths.megatron.run_costs import RunCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.slices.megatron.layers import Calls
from megatron_pp_ext.features.slices.megatron.probe import require_known_operations
from megatron_pp_ext.features.slices.megatron.sliced_stage import SlicedStage
from megatron_pp_ext.features.slices.options import FLAG, SMALLEST, Slices, Unchecked
from megatron_pp_ext.features.slices.plan import Planner
from megatron_pp_ext.features.slices.search import BUDGET
from megatron_pp_ext.features.slices.shared import cut_alike, in_order_of
from megatron_pp_ext.features.slices.units import Units
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.flushed import require_same_schedule
from megatron_pp_ext.integration.runners.message_groups import shapes_of
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.without_collection import without_collection
from megatron_pp_ext.setting_error import StepError

_KEPT = 32
"""The schedules of a family that are kept for later steps with as many units."""


class ByLength:
    """Plans the steps of ``pipeline``, whose sequences are cut as ``option`` says."""

    def __init__(self, pipeline: Pipeline, option: Slices, ordering: Ordering) -> None:
        self._request, self._placement = pipeline.request, pipeline.placement
        self._tokens, self._is_checked, self._ordering = (
            option.tokens,
            pipeline.request.option(Unchecked) is None,
            ordering,
        )
        self._costs = RunCosts(pipeline, ordering)
        self._calls: list[Calls] = []
        self._of_family = lru_cache(maxsize=_KEPT)(self._make)
        self._of_evaluation = lru_cache(maxsize=_KEPT)(self._make_evaluation)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Let the step run in units.

        Evaluations run whole sequences where lengths are not known, and as long as no step has chosen the
        tokens of a unit.
        """
        inputs = step.inputs
        if inputs.forward_only and self._tokens is None:
            yield
            return
        self._calls[:] = self._calls or map(Calls, inputs.model)
        require_known_operations(self._calls, inputs, self._tokens or SMALLEST, self._is_checked)
        data: list[list[Any] | None] = []
        agreed = agree(lambda: self._read(inputs, data), inputs, self._costs.work)
        if inputs.forward_only and agreed.unknown:
            inputs.iterators = _iterators(data, range(inputs.microbatches))
            yield
            return
        if agreed.unknown:
            raise RuntimeError(agreed.unknown)
        pipelines = of_all(agreed.own, inputs)
        with without_collection():
            units, schedule = self.plan(agreed, pipelines, inputs)
            step.plan = plan_rank(schedule, step.plan.rank)
        require_same_schedule(schedule, inputs.groups)
        step.may_move_weights = True  # replicas have other lengths, and so other orders
        firsts = [numbers[0] for numbers in units.of_microbatch]
        inputs.iterators = _iterators(data, sorted(range(inputs.microbatches), key=firsts.__getitem__))
        inputs.shape = ()
        inputs.shapes = shapes_of(inputs, ((units.rows, unit.tokens) for unit in units.units))
        changes: list[torch.Tensor] = []
        step.make_stage = partial(
            SlicedStage,
            units=units,
            calls=self._calls,
            knows_documents=units.rows == 1,
            changes=changes,
        )
        yield
        if changes and torch.stack(changes).any():
            raise StepError(
                "the gradient that the loss function gives one document of a microbatch changes with the "
                "outputs of another, and slices that are planned by length compute it from one before the "
                "other is known; make the loss a sum over documents, give documents that belong together, as "
                f"a pair of DPO, a row each in a microbatch of equal lengths, or leave out {FLAG}"
            )
        if inputs.losses:
            lasts = [numbers[-1] for numbers in units.of_microbatch]
            ended = sorted(range(inputs.microbatches), key=lasts.__getitem__)
            by_number = dict(zip(ended, inputs.losses, strict=True))
            inputs.losses[:] = [by_number[number] for number in range(len(ended))]

    def _read(self, inputs: StepInputs, data: list[list[Any] | None]) -> Documents | None:
        """Read the step's microbatches into ``data``; RuntimeError where one has other rows than its step."""
        documents = read_documents(inputs, data, self._ordering)
        for batch in (batch for batches in data if batches is not None for batch in batches):
            rows, _ = size_of(batch) or (inputs.samples, 0)
            if rows != inputs.samples:
                raise StepError(
                    f"a microbatch has {rows} rows, and slices that are planned by length need as many as "
                    f"micro_batch_size says, which is {inputs.samples}: give microbatches of so many rows, "
                    f"or leave out {FLAG}"
                )
        return documents

    def plan(
        self, agreed: Agreed, pipelines: Sequence[Documents], inputs: StepInputs
    ) -> tuple[Units, Schedule]:
        """Return this pipeline's units of a step, and the order of them.

        ``pipelines`` are those that run this order, because they share experts.  The first step chooses the
        tokens of a unit, where that is left open.
        """
        whole = Microbatches(agreed.planned)
        rates, request = self._costs.by_length(whole), self._request
        multiple = _tensor_ranks(inputs)
        for documents in pipelines:
            _require_rows(documents, inputs)
            _require_divisible(documents, multiple)
        planner = Planner(
            self._placement,
            rates,
            splits_backward=request.may_split_backward,
            overhead=OVERHEAD,
            multiple=multiple,
            rows=inputs.samples,
        )
        if self._tokens is None:
            self._tokens = self._chosen(planner, _of_rows(agreed.planned, inputs), whole)
        mine: Units | None = None
        if len(pipelines) == 1:
            units = planner.cut(_of_rows(agreed.own, inputs), self._tokens)
        else:
            every = [_of_rows(documents, inputs) for documents in pipelines]
            units, of_pipelines = cut_alike(every, self._tokens, multiple, inputs.samples)
            mine = of_pipelines[pipelines.index(agreed.own)]
        if inputs.forward_only:
            schedule = planner.order_of_evaluation(self._of_evaluation, units)
        elif request.is_compiled:
            budget = BUDGET if self._ordering.how == "search" else 0.0
            found = planner.plan_units(units, self._limits(planner, units, whole), budget)
            units, schedule = found.units, found.schedule
        else:
            units, schedule = planner.order_of_family(self._of_family, units)
        return units if mine is None else in_order_of(units, mine), schedule

    def _chosen(self, planner: Planner, documents: Documents, whole: Microbatches) -> int:
        """Return the tokens of a unit with which a step of these ``documents`` is shortest."""
        if not self._request.is_compiled:
            return planner.chosen_in_family(self._of_family, documents)
        limits = self._limits(planner, planner.cut(documents, SMALLEST), whole)
        return planner.chosen_tokens(documents, limits)

    def _limits(self, planner: Planner, units: Units, whole: Microbatches) -> Sequence[float]:
        """Return what each rank may keep in this step.

        A limit that is a part of what 1F1B keeps is raised to what the longest sequence needs: no run is to
        end for one that is longer than others.
        """
        of_step = replace(self._request, microbatches=units.microbatches, ordinary=None)
        budget = of_step.budget(planner.rates.of(whole))
        if budget.holds_messages:
            return budget.ranks
        return tuple(map(max, budget.ranks, planner.least_limits(units)))

    def _make(self, microbatches: int) -> Schedule:
        """Return the schedule of the family for so many microbatches; families are proved by tests."""
        return make(replace(self._request, microbatches=microbatches), is_proved=True).schedule

    def _make_evaluation(self, microbatches: int) -> Schedule:
        return make(evaluation(self._placement, microbatches, self._request.options)).schedule


def _iterators(data: Sequence[Sequence[Any] | None], order: Sequence[int]) -> list[Any]:
    """Return iterators over ``data``, which is that of each chunk, in this ``order`` of microbatches."""
    return [None if batches is None else iter([batches[number] for number in order]) for batches in data]


def _of_rows(documents: Documents, inputs: StepInputs) -> Documents:
    """Return the length that all sequences of a microbatch have, where it has several."""
    return tuple(lengths[:1] for lengths in documents) if inputs.samples > 1 else documents


def _require_rows(documents: Documents, inputs: StepInputs) -> None:
    """Raise RuntimeError unless the sequences of a microbatch have one length; a single one may be packed."""
    rows = inputs.samples
    if rows > 1:
        for number, lengths in enumerate(documents):
            if len(lengths) != rows or len(set(lengths)) > 1:
                raise RuntimeError(
                    f"microbatch {number} has {len(lengths)} lengths, {min(lengths)} to {max(lengths)}, and "
                    f"slices of {rows} samples need as many equal ones, padding included; give those, or one "
                    "sample a microbatch"
                )


def _tensor_ranks(inputs: StepInputs) -> int:
    """Return by how many ranks the tokens of a unit are shared."""
    return int(inputs.groups.tp.size()) if inputs.config.sequence_parallel else 1


def _require_divisible(documents: Documents, multiple: int) -> None:
    for number, lengths in enumerate(documents):
        for length in lengths:
            if length % multiple:
                raise RuntimeError(
                    f"microbatch {number} has a document of {length} tokens, which {multiple} "
                    "tensor-parallel ranks cannot share in slices of sequences; pad documents to a multiple"
                )
