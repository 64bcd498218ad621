"""Steps whose units are planned: the order of microbatches, and how sequences are cut into slices.

All ranks read their microbatches ahead, agree on the lengths, and find the same plan, each for itself.  The
forward step reads the microbatches in the order in which their first units run, on every stage, and the
losses are handed over in the order of the data.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import evaluation
from megatron_pp_ext.features.units.megatron.agreement import (
    Agreed,
    Documents,
    KnownShapes,
    agree,
    of_all,
    size_of,
)
from megatron_pp_ext.features.units.megatron.layers import Calls
from megatron_pp_ext.features.units.megatron.probe import require_known_operations
from megatron_pp_ext.features.units.megatron.read_ahead import (
    Batches,
    one_item_each,
    planned,
    read_documents,
    require_read,
)
from megatron_pp_ext.features.units.megatron.run_costs import RunCosts
from megatron_pp_ext.features.units.megatron.sliced_stage import SlicedStage
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import (
    ORDER_FLAG,
    SLICE_FLAG,
    SMALLEST,
    Ordering,
    Slices,
    Unchecked,
    are_by_length,
)
from megatron_pp_ext.features.units.orders import by_rule
from megatron_pp_ext.features.units.plan import BUDGET, Plan, Planner, Template
from megatron_pp_ext.features.units.rates import OVERHEAD
from megatron_pp_ext.features.units.sliced_orders import SlicePlanner, limits_of, without_units
from megatron_pp_ext.features.units.units import Units, cut_alike, in_order_of, named_units
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import Step, StepPart, require_same_schedule
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import sequence_ranks, shapes_of, sizes_of
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import print_rank_0
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Announced, Schedule
from megatron_pp_ext.schedule.loops import without_collection
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.setting_error import SettingError, StepError

REPLAYS = "moe_enable_routing_replay", "enable_routing_replay"
"""The names in a config, Megatron's and verl's, for routing that is replayed in the order of its record."""

LEAST_GAIN = 0.005
"""The part of a step from which its gain is worth a number."""

MOST_ACTIONS = 20_000
"""The actions of the largest step that is simulated for a line: three orders of it take a second."""

_SEARCHING = 0.75
"""The part of the time for a plan in which an order is searched for; costs and W take the rest."""

_CACHED = 32
"""The schedules of a family that are kept for later steps with as many units."""


def in_units(pipeline: Pipeline) -> StepPart:
    """Return the planner of the units in steps of ``pipeline``, by its request."""
    request = pipeline.request
    ordering, slices = request.option(Ordering), request.option(Slices)
    if slices is not None:
        return InSlices(pipeline, slices, ordering or Ordering("given")).step
    if ordering is None:
        return Unordered(pipeline).step
    return Ordered(pipeline, ordering).step if ordering.how != "given" else lambda step: nullcontext()


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, whose microbatches are read in the order ``reads``, and end in that of ``ends``.

    ``running`` surrounds the step, and raises RuntimeError for what its loop may not do.
    """

    schedule: Schedule
    reads: Sequence[int]
    ends: Sequence[int]
    running: Callable[[], AbstractContextManager[None]]
    announced: Announced = Announced.NOTHING


class PlannedSteps:
    """Plans steps of ``pipeline``: reads ahead, agrees, and hands losses back in the order of the data."""

    evaluates = False
    """Whether evaluations are planned, too."""

    def __init__(self, pipeline: Pipeline, ordering: Ordering) -> None:
        self.request, self.placement = pipeline.request, pipeline.placement
        self.ordering, self.costs = ordering, RunCosts(pipeline, ordering)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Let the step run as planned.

        RuntimeError, in one line, for a loop that does not read its data as a plan needs it.
        """
        inputs = step.inputs
        if inputs.forward_only and not self.evaluates:
            yield
            return
        self.prepare(step)
        data: list[Batches] = []
        agreed = self.agreed(inputs, data)
        in_order = range(inputs.microbatches)
        if agreed.unknown and not inputs.forward_only:
            raise RuntimeError(agreed.unknown)
        plan = None if agreed.unknown else self.planned(step, agreed)
        inputs.iterators = planned(inputs.iterators, data, in_order if plan is None else plan.reads)
        inputs.forward_step_func = one_item_each(inputs.forward_step_func)
        if plan is None:
            yield
            return
        if plan.schedule is not step.schedule:
            with without_collection():
                step.plan = plan_rank(plan.schedule, step.plan.rank, announced=plan.announced)
            require_same_schedule(plan.schedule, inputs.groups)
        with plan.running():
            yield
        require_read(inputs.iterators, step.plan.rank == step.placement.rank_of(0))
        if inputs.losses:
            by_number = dict(zip(plan.ends, inputs.losses, strict=True))
            inputs.losses[:] = [by_number[number] for number in in_order]

    def prepare(self, step: Step) -> None:
        """Refuse what no plan goes with, before anything is read."""
        raise NotImplementedError

    def agreed(self, inputs: StepInputs, data: list[Batches]) -> Agreed:
        """Read the step's microbatches into ``data``, and agree on their lengths."""
        raise NotImplementedError

    def planned(self, step: Step, agreed: Agreed) -> PlannedStep:
        """Return the plan of a step, the same on all ranks that meet in it."""
        raise NotImplementedError


class Ordered(PlannedSteps):
    """Orders whole microbatches, and W by the times of this step; evaluations are left alone.

    Under ``flex`` and ``auto`` each step keeps its limit in tokens: what the compiler finds keeps it for
    equal microbatches.
    """

    def __init__(self, pipeline: Pipeline, ordering: Ordering) -> None:
        super().__init__(pipeline, ordering)
        self._templates: dict[int, Template] = {}
        self._shapes = KnownShapes()

    def prepare(self, step: Step) -> None:
        """See ``PlannedSteps``."""
        _require_no_replay(step.inputs.config)
        step.may_move_weights = self._moves_weights(step)
        self.costs.learn(step)

    def agreed(self, inputs: StepInputs, data: list[Batches]) -> Agreed:
        """See ``PlannedSteps``."""
        return agree(
            lambda: read_documents(inputs, data, self.ordering),
            inputs,
            self.costs.work,
            lambda: self._shapes.known_sizes(inputs, data),
            self._shapes.are_trusted,
        )

    def planned(self, step: Step, agreed: Agreed) -> PlannedStep:
        """See ``PlannedSteps``.  Under ``auto`` the first step is as given: nobody knows of its memory."""
        inputs, how, limits = step.inputs, self.ordering.how, None
        planner = Planner(step.placement, self.costs.by_length(Microbatches(agreed.planned)))
        units = planner.whole(agreed.planned)
        if self.request.is_compiled:
            if catalog.abilities(self.request.schedule).measures_memory and not step.free:
                how = "given"
            else:
                limits = limits_of(replace(self.request, free=tuple(step.free) or None), planner, units)
        template = self.template(step)
        plan = planner.plan(units, how, template=template, limits=limits, budget=_SEARCHING * BUDGET)
        order = plan.order
        self.costs.note(inputs.training_steps, Microbatches(agreed.own).ordered(order))
        return PlannedStep(
            planner.timed(plan).schedule,
            order,
            order,
            lambda: self._shapes.step(inputs, agreed, order),
            inputs.announces if self._shapes.are_announced(inputs, agreed) else Announced.NOTHING,
        )

    def template(self, step: Step) -> Template:
        """Return the template of the schedule that is in force, which is kept for later steps."""
        schedule = step.schedule
        template = self._templates.get(schedule.microbatches)
        if template is None or template.schedule is not schedule:
            template = self._templates[schedule.microbatches] = Template(schedule, step.may_move_weights)
        return template

    def _moves_weights(self, step: Step) -> bool:
        """Whether W may be moved: not those of a file, nor where copies or pairs are planned around them."""
        schedule, config = step.schedule, step.inputs.config
        if self.request.from_file is not None or schedule.paired or schedule.copies:
            return False
        return schedule.splits_backward and not config.fine_grained_activation_offloading


class InSlices(PlannedSteps):
    """Cuts sequences by ``slices``, and plans the units of all microbatches.

    Without an order all sequences have the length of the model's, and the schedule of the step is planned for
    that already.  With one, each step is planned from the lengths of its own.  Evaluations then run whole
    sequences where lengths are not known, and as long as no step has chosen the tokens of a unit.
    """

    def __init__(self, pipeline: Pipeline, slices: Slices, ordering: Ordering) -> None:
        super().__init__(pipeline, ordering)
        self._slices, self._tokens = slices, slices.tokens
        self._is_by_length = are_by_length(pipeline.request)
        self._is_checked = pipeline.request.option(Unchecked) is None
        self._calls: list[Calls] = []
        self._family = without_units(self.request)
        self._of_family = lru_cache(maxsize=_CACHED)(self._make)
        self._is_compared = False
        self._of_evaluation = lru_cache(maxsize=_CACHED)(self._make_evaluation)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """See ``PlannedSteps``; without an order nothing is read ahead, and nothing agreed."""
        if self._is_by_length:
            with super().step(step):
                yield
            return
        if step.schedule.units:
            self.prepare(step)
            units = named_units(step.schedule.units, step.inputs.samples)
            _require_length(step.inputs, self._slices.length)
            self._cut(step, units)
        yield

    def _cut(self, step: Step, units: Units, changes: list[torch.Tensor] | None = None) -> None:
        """Let the stages of the step compute ``units``."""
        inputs = step.inputs
        inputs.shape = ()
        # After a prediction before the last stage a message has the hidden states of several tokens.
        if not inputs.config.mtp_standalone:
            inputs.shapes = shapes_of(inputs, ((units.rows, unit.tokens) for unit in units.units))
        step.make_stage = partial(
            SlicedStage,
            units=units,
            calls=self._calls,
            knows_documents=changes is not None and units.rows == 1,
            changes=changes,
        )

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        """See ``PlannedSteps``."""
        return self._tokens is not None

    def prepare(self, step: Step) -> None:
        """See ``PlannedSteps``."""
        _require_no_replay(step.inputs.config, SLICE_FLAG)
        self._calls[:] = self._calls or map(Calls, step.inputs.model)
        require_known_operations(self._calls, step.inputs, self._tokens or SMALLEST, self._is_checked)

    def agreed(self, inputs: StepInputs, data: list[Batches]) -> Agreed:
        """See ``PlannedSteps``."""
        return agree(lambda: self._read(inputs, data), inputs, self.costs.work)

    def _read(self, inputs: StepInputs, data: list[Batches]) -> Documents | None:
        """Read the step's microbatches into ``data``; RuntimeError where one has other rows than its step."""
        documents = read_documents(inputs, data, self.ordering)
        for batch in (batch for batches in data if batches is not None for batch in batches):
            rows, _ = size_of(batch) or (inputs.samples, 0)
            if rows != inputs.samples:
                raise StepError(
                    f"a microbatch has {rows} rows, and slices that are planned by length need as many as "
                    f"micro_batch_size says, which is {inputs.samples}: give microbatches of so many rows, "
                    f"or leave out {SLICE_FLAG}"
                )
        return documents

    def planned(self, step: Step, agreed: Agreed) -> PlannedStep:
        """See ``PlannedSteps``."""
        inputs = step.inputs
        pipelines = of_all(agreed.own, inputs)
        with without_collection():
            units, schedule = self.plan(agreed, pipelines, step)
        step.may_move_weights = True  # replicas have other lengths, and so other orders
        changes: list[torch.Tensor] = []
        self._cut(step, units, changes)
        numbers, in_order = units.of_microbatch, range(inputs.microbatches)
        reads = sorted(in_order, key=lambda microbatch: numbers[microbatch][0])
        ends = sorted(in_order, key=lambda microbatch: numbers[microbatch][-1])
        return PlannedStep(schedule, reads, ends, lambda: _summed_over_documents(changes), inputs.announces)

    def plan(self, agreed: Agreed, pipelines: Sequence[Documents], step: Step) -> tuple[Units, Schedule]:
        """Return this pipeline's units of a step, and the order of them.

        ``pipelines`` are those that run this order, because they share experts.  The first step chooses the
        tokens of a unit, where that is left open.
        """
        inputs = step.inputs
        multiple = sequence_ranks(inputs)
        for documents in pipelines:
            _require_rows(documents, inputs)
            _require_divisible(documents, multiple)
        planner = Planner(
            self.placement,
            self.costs.by_length(Microbatches(agreed.planned)),
            splits_backward=self.request.may_split_backward,
            overhead=OVERHEAD,
            multiple=multiple,
            rows=inputs.samples,
        )
        whole = planner.whole(agreed.planned)
        request = replace(self._family, free=tuple(step.free) or None)
        steps = SlicePlanner(request, planner, self._of_family, is_raised=True)
        if self._tokens is None:
            self._tokens = steps.chosen(_of_rows(agreed.planned, inputs), whole)
        units, mine = planner.cut(_of_rows(agreed.own, inputs), self._tokens), None
        if len(pipelines) > 1:
            every = [_of_rows(documents, inputs) for documents in pipelines]
            alike, of_pipelines = cut_alike(every, self._tokens, multiple, inputs.samples)
            units, by_cost, mine = alike, units, of_pipelines[pipelines.index(agreed.own)]
        if inputs.forward_only:
            plan = planner.in_given_order(self._of_evaluation, units)
        else:
            plan = steps.plan(units, self.ordering.how, whole)
            if mine is not None and not self._is_compared:
                self._is_compared = True
                self._compare(plan, steps.plan(by_cost, "rule", whole))
        return plan.units if mine is None else in_order_of(plan.units, mine), planner.timed(plan).schedule

    def _compare(self, alike: Plan, by_cost: Plan) -> None:
        """Log what it costs that pipelines which share experts run slices of equal tokens."""
        print_rank_0(
            f"megatron_pp_ext: pipelines that share experts run one order, in {len(alike.units)} slices of "
            f"equal tokens; alone this one would take {1 - by_cost.seconds / alike.seconds:.1%} less time in "
            f"{len(by_cost.units)} slices of equal cost, by simulation"
        )

    def _make(self, microbatches: int) -> Schedule:
        """Return the schedule of the family for so many microbatches; families are proved by tests."""
        return make(replace(self._family, microbatches=microbatches), is_proved=True).schedule

    def _make_evaluation(self, microbatches: int) -> Schedule:
        return make(evaluation(self.placement, microbatches, self._family.options)).schedule


class Unordered:
    """Leaves the data of ``pipeline`` as it is, and logs once what the order by rule would bring.

    Lengths are those that messages have announced, so that no batch is looked into: where all messages have
    one shape nothing is logged, whatever documents they hold.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_logged = False

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Surround a step; only the first rank of the job looks at it, once it has run."""
        yield
        if self._is_logged or step.inputs.forward_only or dist.get_rank() > 0:
            return
        announced = step.inputs.announced or {}
        if len(announced) == step.inputs.microbatches and self._may_order(step):
            # A stage may hand on fewer tokens than it got; the most cost most.
            sizes = sizes_of(step.inputs, (max(announced[number]) for number in range(len(announced))))
            if len(set(sizes)) > 1:
                self._is_logged = True
                with suppress(ValueError):  # any model may train, also one that the estimate does not know
                    self._log(step, Microbatches.of([tokens] * rows for rows, tokens in sizes))

    def _may_order(self, step: Step) -> bool:
        """Return whether an order is possible (``rules``), and simulated in no time."""
        request, config = self._pipeline.request, step.inputs.config
        if request.is_compiled and (request.options or config.expert_model_parallel_size > 1):
            return False
        is_small = sum(map(len, step.schedule.orders)) <= MOST_ACTIONS
        return is_small and not any(getattr(config, name, False) for name in REPLAYS)

    def _log(self, step: Step, microbatches: Microbatches) -> None:
        run_costs = RunCosts(self._pipeline, Ordering("rule"))
        costs = run_costs.by_length(microbatches).of(microbatches)
        orders = by_rule(run_costs.work(microbatches), step.placement)
        as_given = simulate(step.schedule, costs).makespan
        shortest = min(simulate(step.schedule, costs.ordered(order)).makespan for order in orders)
        gain = 1 - shortest / as_given
        request = "order='rule'" if self._pipeline.is_per_model else f"{ORDER_FLAG} rule"
        print_rank_0(
            f"megatron_pp_ext: microbatches of {min(microbatches.tokens):,} to {max(microbatches.tokens):,} "
            f"tokens run in the order of the data; with {request} this step would have taken "
            f"{f'{gain:.0%}' if gain >= LEAST_GAIN else 'no'} less time by simulation (docs/lengths.md says "
            "what an order asks of a loop)"
        )


@contextmanager
def _summed_over_documents(changes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise RuntimeError after a step in which the gradient of a document has changed with another one."""
    yield
    if changes and torch.stack(list(changes)).any():
        raise StepError(
            "the gradient that the loss function gives one document of a microbatch changes with the "
            "outputs of another, and slices that are planned by length compute it from one before the "
            "other is known; make the loss a sum over documents, give documents that belong together, as "
            f"a pair of DPO, a row each in a microbatch of equal lengths, or leave out {SLICE_FLAG}"
        )


def _require_no_replay(config: Any, flag: str = "the order") -> None:
    """Raise RuntimeError for a config whose routing is replayed; verl's is no flag of Megatron's."""
    for name in REPLAYS:
        if getattr(config, name, False):
            raise RuntimeError(
                f"{name} in the model's config: routing is replayed in the order of its record; unset it, or "
                f"leave {flag} out"
            )


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


def _require_divisible(documents: Documents, multiple: int) -> None:
    for number, lengths in enumerate(documents):
        for length in lengths:
            if length % multiple:
                raise RuntimeError(
                    f"microbatch {number} has a document of {length} tokens, which {multiple} "
                    "ranks cannot share in slices of sequences; pad documents to a multiple"
                )


def _require_length(inputs: StepInputs, length: int) -> None:
    """Raise ValueError unless the step's sequences have the ``length`` that its schedule was made for."""
    varies = inputs.config.variable_seq_lengths
    if not inputs.shape and inputs.config.mtp_standalone and not varies:
        return  # messages announce their shapes, and a batch of another length is refused as it is cut
    if varies or inputs.shape[0] * sequence_ranks(inputs) != length:
        raise SettingError(
            f"slices were planned for sequences of {length} tokens, and this step has others; give all steps "
            "this length, let --pipeline-order rule plan each step, or leave out --pipeline-slice-tokens"
        )
