"""A model placed on ranks: what every stage and every rank computes, keeps and exchanges, whatever the order.

``estimate`` adds what depends on the order: when actions run, and how many microbatches are in flight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.costs.model_parts import ModelParts, model_parts, pair
from megatron_pp_ext.costs.optimizers import ModelState, Sharing, model_state, update_seconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.stages import (
    every_token,
    head_costs,
    head_part,
    hop_seconds,
    message_bytes,
    stage_parts,
)
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job import sizes, stage_costs
from megatron_pp_ext.job.layers import by_stage, predicting_stage
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.messages import EMBEDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.estimate import Estimate


class Addition:
    """The part of a feature in estimates; this one adds nothing."""

    def units(self, job: Job) -> float:
        """Return into how many units of a schedule ``job`` cuts each microbatch."""
        return 1.0

    def costs(self, work: "Workload", costs: Costs) -> Costs:
        """Return the ``costs`` of the stages of ``work`` with what the feature's actions take."""
        return costs

    def in_step(self, work: "Workload", schedule: Schedule, costs: Costs) -> Costs:
        """Return the ``costs`` of a microbatch as those of the actions of ``schedule``."""
        return costs

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Return the most bytes of activations of each rank, which are ``peaks`` without the feature."""
        return peaks

    def completed(self, estimate: "Estimate", work: "Workload", schedule: Schedule) -> "Estimate":
        """Return the ``estimate`` of one step of ``schedule`` with what the feature knows of it."""
        return estimate

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        """Yield what steps of ``schedule`` have and no published step had, in words (``error_band``)."""
        yield from ()

    def lines(self, estimate: "Estimate") -> Iterator[str]:
        """Yield what people should read of the ``estimate`` after the memory of its ranks."""
        yield from ()


def additions() -> list[Addition]:
    """Return the parts of all features that have one."""
    return list(filter(None, (feature.addition() for feature in FEATURES)))


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of a rank besides its actions: gradients are reduced, weights gathered, and weights updated."""

    reduction: float
    gathering: float
    update: float


def waits(job: Job, system: System, part: Part, sharing: Sharing) -> Waits:
    """Return the seconds that a rank whose stages add up to ``part`` waits in a step without overlap.

    Ranks that are next to each other share the optimizer's state, and sum gradients by a reduce-scatter.
    Where it has several instances, the ranks with the same share of it all-reduce that after
    (``start_grad_sync`` in megatron.core.distributed.param_and_grad_buffer).
    """
    parallel, precision, instances = job.parallel, job.precision, job.memory.instances
    shared = sharing.of_state(job.memory) if instances > 1 else sharing
    groups = (
        (part.parameters, shared.dense, parallel.tensor_model_parallel_size),
        (part.expert_parameters, shared.expert, parallel.expert_ranks),
    )
    out = sum(system.gather_seconds(precision.gradient_size * size, *group) for size, *group in groups)
    across = sum(
        system.all_reduce_seconds(precision.gradient_size * size / ranks, instances, stride * ranks)
        for size, ranks, stride in groups
    )
    # All weights of experts are operands.
    operands = (
        max(0.0, part.fp8_parameters - part.expert_parameters),
        min(part.fp8_parameters, part.expert_parameters),
    )
    less = precision.weight_size - precision.gathered_size
    back = sum(
        system.gather_seconds(precision.weight_size * size - less * operand, *group)
        for (size, *group), operand in zip(groups, operands, strict=True)
    )
    is_sharded = job.memory.shards_state
    state = model_state(job, part, sharing)
    return Waits(
        reduction=out + across if is_sharded else 2 * out,
        gathering=back if is_sharded else 0.0,
        update=update_seconds(job, system, state.update, state.gradients),
    )


_BUCKET = 40e6
"""The fewest weights in a bucket of Megatron's gradient buffers, or a million for each data-parallel rank
if that is more."""

_EXCHANGED = EMBEDS_AHEAD + 2
"""The hidden states on their way about a split head: those embedded ahead of their forwards, the
gradient of one that was, and the last stage's output."""


def model_on(job: Job, system: System) -> ModelParts:
    """Return the parts of ``job``'s model with the seconds that they take on ``system``.

    Those of whole stages are in the file of --pipeline-costs, if there is one.
    """
    measured = None if job.pipeline.pipeline_costs is None else stage_costs.read(job)
    return model_parts(job, SystemKernelSeconds(system, job), measured=measured)


class Workload:
    """``job``'s model on ``system``, its stages, and a head that ranks may split, placed by ``placement``.

    ``data`` is the data-parallel size.  ``layers_by_stage`` is even where it is left out; ValueError
    where the layers do not fill the stages.  ``model`` may be shared by workloads whose layers are the
    same.  Where stages were measured (--pipeline-costs), they cost that, and a message too if
    it was measured.

    With --pipeline-replicas each rank of ``placement`` stands for all replicas of its stage, which are alike,
    and ``data`` is 1.
    """

    def __init__(
        self,
        job: Job,
        system: System,
        placement: Placement,
        data: int,
        layers_by_stage: Sequence[int] | None = None,
        model: ModelParts | None = None,
    ) -> None:
        self.job, self.placement, self.data = job, placement, data
        parallel, replicated = job.parallel, sizes.requested_replicas(job)
        self.tensor, self.context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        # The copies that there are of each stage.
        self._copies = replicated.counts if replicated else (data,) * placement.ranks
        self.gpus = self.tensor * self.context * sum(self._copies)
        self.system = system = system.at_scale(self.gpus)
        # Ranks that have the same experts are so far apart.
        self._expert_stride = parallel.expert_ranks
        model = model or model_on(job, system)
        self.layers = by_stage(job, placement.stages) if layers_by_stage is None else layers_by_stage
        self.model = model
        shares = placement.splits_head
        self._head_part = head_part(job, model) if shares else Part()
        self.exchanged_bytes = _EXCHANGED * every_token(job, model) if shares else 0.0
        senders, apart = (replicated.ranks, 1) if replicated else (placement.ranks, data)
        self._hop_link = system.message_link(senders, apart * self.tensor * self.context)
        message, hop = (model.measured.message, model.measured.hop) if model.measured else (0.0, 0.0)
        self.message = message or message_bytes(job, model.hidden_bytes)
        hop = hop or hop_seconds(job, system, self._hop_link, self.message)
        self.hop = hop if placement.ranks > 1 else 0.0
        self.head = head_costs(job, model, self.hop) if shares else None

    @cached_property
    def parts(self) -> list[Part]:
        """The costs of each stage, with what is exchanged for each microbatch of weights that are sharded."""
        parts = stage_parts(self.job, self.model, self.layers, self.placement.splits_head)
        if 0 < self._deferred < self._microbatches:
            # Microbatches cost the same here: each has its part of the products that are not deferred.
            product = replace(self.model.deferred, after_input_gradient=0.0)
            parts[-1] = parts[-1] + product.times(1 - self._deferred / self._microbatches)
        return _once(self._sharded, parts) if self.job.memory.shards_gradients else parts

    @cached_property
    def captured(self) -> list[tuple[Part, int]]:
        """What CUDA graphs of layers capture of each stage, and of how many layers it has any.

        Of measured stages they capture all.
        """
        if self.model.measured is not None:
            return list(zip(self.parts, self.layers, strict=True))
        ends = list(accumulate(self.layers))
        stages = [
            self.model.captured[end - count : end] for end, count in zip(ends, self.layers, strict=True)
        ]
        if predictions := self.job.model.mtp_num_layers:
            stage = predicting_stage(self.job, len(stages))
            assert stage is not None
            stages[stage] += self.model.captured[-1:] * predictions
        return [(sum(stage, Part()), sum(part.after_forward > 0 for part in stage)) for stage in stages]

    def _sharded(self, part: Part) -> Part:
        """Return ``part``, in which weights are gathered and gradients reduced layer by layer.

        Megatron-FSDP does so during the computation of other layers, which loses as in ``exposed``.
        """
        wait = waits(self.job, self.system, part, self.sharing)
        gathering = wait.gathering if self.job.memory.shards_weights else 0.0
        return replace(
            part,
            forward_seconds=part.forward_seconds + self._shown(gathering, part.forward_seconds),
            input_gradient_seconds=part.input_gradient_seconds
            + self._shown(gathering + wait.reduction, part.backward_seconds),
        )

    def _shown(self, traffic: float, computation: float, least: float = 0.0) -> float:
        """Return the seconds of data-parallel ``traffic`` that a simultaneous ``computation`` does not hide.

        It hides none of the ``least`` part.  Of what is hidden a part is lost, since the computation has
        fewer processors and less of the memory; in a pipeline this falls into idle time.
        """
        lost = 1 - self.system.sustained.get("overlap", 1.0) if self.placement.ranks == 1 else 0.0
        shown = max(least * traffic, traffic - computation)
        return shown + lost * (traffic - shown)

    @cached_property
    def costs(self) -> Costs:
        """The costs of the stages, as a schedule takes them."""
        stages = tuple(_once(Part.costs, self.parts))
        costs = Costs(
            stages,
            self.hop,
            self.message,
            self.head,
            pair=self.together(self.parts),
            sequence=tuple(part.sequence for part in self.parts),
        )
        starts = self.job.parallel.action_starts
        if starts and self.placement.ranks > 1:
            costs = costs.longer_by(starts * self.system.kernel_seconds)
        for addition in additions():
            costs = addition.costs(self, costs)
        return costs

    @property
    def waits_for_messages(self) -> bool:
        """Whether each rank waits for its messages, as it does in Megatron's own functions.

        ``_communicate`` of megatron.core.pipeline_parallel.p2p_communication waits, unless messages overlap
        computation, which only the interleaved function lets them do.  Schedules of this package never wait.
        """
        if self.job.pipeline.pipeline_schedule is not None or self.placement.ranks == 1:
            return False
        return self.placement.chunks == 1 or not self.job.parallel.overlap_p2p_comm

    def together(self, parts: Sequence[Part]) -> float:
        """Return the share of their seconds that actions take together, on average over ``parts``."""
        return pair(self.job, parts)

    @cached_property
    def units(self) -> float:
        """The units of a schedule into which each microbatch is cut."""
        return max(addition.units(self.job) for addition in additions())

    @property
    def head_parameters(self) -> Part:
        """The parameters of a rank's part of a split head."""
        return Part(parameters=self._head_part.parameters)

    @cached_property
    def head_rank(self) -> int:
        """The rank with the output layer and the loss."""
        return self.placement.rank_of(self.placement.stages - 1)

    def loss_bytes(self, rank: int, share: float = 1.0) -> float:
        """Return the bytes of the loss on ``rank``, of which each one that shares it has a part.

        They include what waits for the deferred weight gradients of the output layer, and its buffer.  Units
        are a ``share`` of a microbatch.
        """
        model = self.model
        if self.placement.splits_head:
            return share * model.split_workspace / self.placement.ranks
        if rank != self.head_rank:
            return 0.0
        moving = model.loss_workspace + self._deferred * model.deferred.after_input_gradient
        return share * moving + model.output_buffer

    def deferred_seconds(self, rank: int) -> float:
        """Return the seconds of a step's deferred gradients after the last backward of ``rank``."""
        return self._deferred * self.model.deferred.weight_gradient_seconds if rank == self.head_rank else 0.0

    @property
    def _deferred(self) -> int:
        """The microbatches of a step whose gradients of the output layer are deferred."""
        if not self.job.defers_embedding:
            return 0
        return self.job.parallel.deferred_microbatches(self._microbatches)

    @property
    def _microbatches(self) -> int:
        return sizes.microbatches(self.job, self.data)

    def summed(self, parts: Sequence[Part]) -> Part:
        """Return the sum of a rank's ``parts``, with the parameters of its part of a split head."""
        first, *rest = parts
        return sum(rest, first) + self.head_parameters

    @cached_property
    def by_rank(self) -> list[Part]:
        """The sum of the stages of each rank, with the parameters of its part of a split head."""
        sums = []
        cache: dict[tuple[int, ...], Part] = {}
        for stages in stages_of_ranks(self.placement):
            parts = [self.parts[stage] for stage in stages]
            key = tuple(map(id, parts))
            if key not in cache:
                cache[key] = self.summed(parts)
            sums.append(cache[key])
        if self.placement.ranks == 1 and not self.job.model.untie_embeddings_and_output_weights:
            # A single rank has one copy of a tied weight.
            sums[0] = sums[0] + Part(parameters=-self._tied)
        return sums

    @property
    def sharing(self) -> Sharing:
        """The numbers of ranks over which the first stage's gradients are summed, and others' as a rule.

        Only --pipeline-replicas makes a difference between stages.
        """
        return self._sharings[0]

    @cached_property
    def _sharings(self) -> list[Sharing]:
        """The same for each rank; an expert's ranks are those that have it."""

        def shared_by(copies: int) -> Sharing:
            dense = copies * self.context
            return Sharing(dense, max(1, dense * self.tensor // self._expert_stride))

        return _once(shared_by, self._copies)

    @cached_property
    def states(self) -> list[ModelState]:
        """Weights, gradients and optimizer state of each rank."""
        state = partial(model_state, self.job)
        return _once(state, self.by_rank, self._sharings)

    @cached_property
    def waits(self) -> list[Waits]:
        """The seconds that each rank waits besides its actions if nothing is overlapped."""
        return _once(partial(waits, self.job, self.system), self.by_rank, self._sharings)

    def exposed(self, rank: int) -> Waits:
        """Return the seconds of ``rank`` that its last backward and first forward do not hide.

        The last bucket of gradients, and the first of weights, cannot be hidden.
        """
        wait, least = self.waits[rank], self.last_bucket(rank)
        reduction, gathering = wait.reduction, wait.gathering
        if self.job.memory.shards_gradients:
            reduction = 0.0
            gathering = 0.0 if self.job.memory.shards_weights else gathering
        elif self.job.parallel.overlap_grad_reduce:
            reduction = self._shown(reduction, self.backward_seconds(rank), least)
        if self.job.parallel.overlap_param_gather:
            gathering = self._shown(gathering, self.by_rank[rank].forward_seconds, least)
        return replace(wait, reduction=reduction, gathering=gathering)

    @property
    def tied_seconds(self) -> float:
        """The seconds to sum a tied weight's gradients, if two ranks have the weight."""
        exists_once = self.head_rank == self.placement.rank_of(0) or self.placement.splits_head
        if self.job.model.untie_embeddings_and_output_weights or exists_once:
            return 0.0
        return self._hop_link.seconds(self.job.precision.gradient_size * self._tied)

    @property
    def _tied(self) -> float:
        """The parameters of a rank's share of the embedding."""
        return self.job.padded_vocabulary * self.job.model.hidden_size / self.tensor

    def last_bucket(self, rank: int) -> float:
        """Return the share of a rank's gradients that is complete only after its very last action."""
        part = self.by_rank[rank]
        bucket = max(_BUCKET, 1e6 * self._sharings[rank].dense)
        return min(1.0, bucket / max(1.0, part.parameters + part.expert_parameters))

    def backward_seconds(self, rank: int) -> float:
        """Return the seconds of the two halves of the backward of one microbatch on a rank."""
        return self.by_rank[rank].backward_seconds

    def update_seconds(self, state: ModelState) -> float:
        """Return the seconds in which a rank updates its weights."""
        return update_seconds(self.job, self.system, state.update, state.gradients)


@cache
def stages_of_ranks(placement: Placement) -> list[tuple[int, ...]]:
    """Return the stages of each rank of ``placement``."""
    return [placement.stages_of(rank) for rank in range(placement.ranks)]


def _once[Made](compute: Callable[..., Made], *columns: Sequence[Any]) -> list[Made]:
    """Return ``compute`` of every row, called once for rows of the same objects, as most stages have."""
    keys = [tuple(map(id, row)) for row in zip(*columns, strict=True)]
    distinct = dict(zip(keys, zip(*columns, strict=True), strict=True))
    results = {key: compute(*row) for key, row in distinct.items()}
    return [results[key] for key in keys]
