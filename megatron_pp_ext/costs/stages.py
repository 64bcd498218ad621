"""The stages that are cut from a model, the head that may be split over ranks, and the costs of both."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

from megatron_pp_ext.costs.model_parts import ModelParts, model_parts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.job import layers
from megatron_pp_ext.job import stage_costs as measured_stages
from megatron_pp_ext.job.layers import predicting_stage
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.costs import CostModel, Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.placement import Placement


def every_token(job: Job, model: ModelParts) -> float:
    """Return the bytes of the hidden states of all tokens, which sequence parallelism divides elsewhere."""
    return model.hidden_bytes * job.parallel.sequence_ranks


def message_bytes(job: Job, hidden_bytes: float) -> float:
    """Return the bytes of a message: an activation of ``hidden_bytes``, in fp32 where the residuals are."""
    is_wider = job.precision.fp32_residual_connection and job.precision.is_half
    return 2 * hidden_bytes if is_wider else hidden_bytes


def head_part(job: Job, model: ModelParts) -> Part:
    """Return a rank's part of a head that is split over the pipeline's ranks, and with it of the embedding.

    From S to T a rank keeps its exponentials, and the hidden states of all tokens twice: as they came and
    their gradient's part.  A tied weight exists once.  Where the parameters of stages are measured, they
    include this part's.
    """
    ranks, output = job.parallel.pipeline_model_parallel_size, model.output
    exponentials = max(0.0, output.after_input_gradient - model.hidden_bytes) / ranks
    rows = output.parameters
    if job.model.untie_embeddings_and_output_weights:
        rows += model.table.parameters
    if model.counts_weights:
        rows = 0.0
    return Part(
        weight_operations=output.weight_operations / ranks,
        forward_seconds=output.forward_seconds / ranks,
        input_gradient_seconds=output.input_gradient_seconds / ranks,
        weight_gradient_seconds=output.weight_gradient_seconds / ranks,
        after_forward=exponentials + 2 * every_token(job, model),
        parameters=rows / ranks,
    )


def head_costs(job: Job, model: ModelParts, hop: float = 0.0) -> HeadCosts:
    """Return the costs of ``head_part``, as a schedule takes them.

    An S does the part's forward and its part of the input gradient.  ``hop`` is a message's latency between
    stages.  A part that was measured costs that, with the exchanges of a hop where they were not measured.
    """
    measured = model.measured.head if model.measured else None
    if measured is not None:
        return measured if measured.hidden else measured.exchanged_over(hop)
    part = head_part(job, model)
    alone = HeadCosts(
        scores=part.forward_seconds + part.input_gradient_seconds,
        weight_gradient=part.weight_gradient_seconds,
        activation=part.after_forward,
    )
    return alone.exchanged_over(hop)


def stage_parts(
    job: Job,
    model: ModelParts,
    layers_by_stage: Sequence[int],
    splits_head: bool = False,
    predicting: int | None = None,
) -> list[Part]:
    """Return the costs of each stage of ``model``, given the layers of each; equal stages are one object.

    The embedding is in the first stage; the output layer and the losses are in the last, and so is
    multi-token prediction, if the model has any, unless ``predicting`` or a layout puts it, with its copy of
    the embedding, elsewhere.  With ``splits_head`` the embedding's rows, the output layer and the loss are in
    none.

    Stages that were measured have their own seconds and bytes.  If their parameters were counted, nothing
    comes from formulas; otherwise these give the parameters and operations.  ValueError where ``measured``
    are no costs of such stages.
    """
    if model.measured is None:
        return _by_formulas(job, model, layers_by_stage, splits_head, predicting)
    stages = len(layers_by_stage)
    costs = measured_stages.cut(model.measured, job, stages, splits_head)
    if model.counts_weights:
        parts = [_weights(job, stage) for stage in costs.stages]
    else:
        parts = _by_formulas(job, model, layers_by_stage, splits_head, predicting)
    return [
        part.measured(stage, costs.overlapped_together(stage))
        for part, stage in zip(parts, costs.stages, strict=True)
    ]


def _weights(job: Job, stage: StageCosts) -> Part:
    """Return the weights of a measured ``stage``; any product may read them in FP8."""
    parameters = stage.parameters + stage.expert_parameters
    return Part(
        parameters=stage.parameters,
        expert_parameters=stage.expert_parameters,
        fp8_parameters=parameters if job.precision.uses_fp8 else 0.0,
    )


def _by_formulas(
    job: Job, model: ModelParts, layers_by_stage: Sequence[int], splits_head: bool, predicting: int | None
) -> list[Part]:
    ends, memory = list(accumulate(layers_by_stage)), job.memory
    how = memory.recompute_granularity, memory.recompute_method, memory.recompute_num_layers
    offloaded = memory.cpu_offloading_num_layers
    sums = []
    for start, end in zip([0, *ends], ends, strict=False):
        key = *how, offloaded, *model.kinds[start:end]
        if key not in model.stages:
            layers = _recomputed(job, model.hidden_bytes, model.layers[start:end])
            stage = _sum(layers)
            if offloaded:
                stage = _offloaded(stage, layers[:offloaded], model.to_host)
            of_layer = max((layer.after_forward for layer in layers), default=0.0)
            model.stages[key] = replace(stage + model.other, of_layer=of_layer)
        sums.append(model.stages[key])
    for first, last in end_parts(model, splits_head):
        sums[0] += first
        sums[-1] += last
    if job.model.mtp_num_layers:
        if predicting is None:
            predicting = predicting_stage(job, len(sums))
        assert predicting is not None
        predicted, losses = prediction_parts(job, model, has_embedding=predicting == 0)
        sums[predicting] += predicted
        sums[-1] += losses
    return sums


def end_parts(model: ModelParts, splits_head: bool) -> list[tuple[Part, Part]]:
    """Return the embedding part of the first stage and the output part of the last."""
    ends = [(model.positions, model.last_norm)]
    return ends if splits_head else [*ends, (model.table, model.output)]


def prediction_parts(job: Job, model: ModelParts, has_embedding: bool) -> tuple[Part, Part]:
    """Return the MTP parts of the stage that predicts, and of the last stage.

    All depths take one embedding, of which the stage gets a copy unless it ``has_embedding`` anyhow.
    """
    count, depth = job.model.mtp_num_layers, model.prediction
    predicted = depth.repeated(count) if job.model.mtp_use_repeated_layer else depth.times(count)
    if count and not has_embedding:
        predicted += Part(parameters=model.output.parameters)
    return predicted, replace(model.head, parameters=0).times(count)


def kept_input(job: Job, hidden_bytes: float) -> float:
    """Return the bytes that a group of recomputed layers keeps, of an input of ``hidden_bytes``."""
    ranks = job.parallel.tensor_model_parallel_size if job.memory.distribute_saved_activations else 1
    return hidden_bytes / ranks


def _sum(parts: Sequence[Part]) -> Part:
    total = Part()
    for _, run in groupby(parts, key=id):
        equal_parts = list(run)
        total += equal_parts[0].times(len(equal_parts))
    return total


def _recomputed(job: Job, hidden_bytes: float, stage: Sequence[Part]) -> Sequence[Part]:
    """Return the layers of a stage; full recomputation puts them in groups that keep only their input."""
    if not job.memory.recomputes_layers or not stage:
        return stage
    size = job.memory.recomputed_together
    whole: Sequence[Part] = []
    if job.memory.recomputes_first:
        stage, whole, size = stage[:size], stage[size:], 1
    input_bytes = kept_input(job, hidden_bytes)
    groups = [stage[start : start + size] for start in range(0, len(stage), size)]
    sums = {key: _sum(group).recomputed(input_bytes) for group in groups for key in (tuple(map(id, group)),)}
    return [*(sums[tuple(map(id, group))] for group in groups), *whole]


def _offloaded(stage: Part, layers: Sequence[Part], to_host: float) -> Part:
    """Return a stage whose first ``layers`` are copied to the host, at ``to_host`` seconds a byte.

    Transformer Engine spreads their copies over the forwards and backwards of all layers, which wait where
    copies take longer (pytorch/cpu_offload.py, ``AsyncDoubleBufferGroupOffloadHandler``).  One layer's are
    on the device meanwhile.
    """
    copied = _sum(layers).after_forward
    seconds = to_host * copied
    return replace(
        stage,
        forward_seconds=max(stage.forward_seconds, seconds),
        input_gradient_seconds=max(stage.input_gradient_seconds, seconds - stage.weight_gradient_seconds),
        after_forward=stage.after_forward - copied + max(layer.after_forward for layer in layers),
    )


def cost_model[J: Job](job: J, estimate: Callable[[J, Placement], Costs]) -> CostModel:
    """Return the model by which stages of ``job`` cost what ``estimate`` returns, at other lengths too."""

    def at(tokens: int, sequences: int) -> CostModel:
        return cost_model(job.changed(seq_length=tokens, micro_batch_size=sequences), estimate)

    return CostModel(partial(estimate, job), at)


def stage_costs(job: Job, placement: Placement, rows: int) -> Costs:
    """Return the costs of the stages of ``placement``, cut as Megatron will cut them; hops are free.

    Seconds are proportional to floating-point operations, activations and messages are counted in bytes.
    The embedding has ``rows`` rows.

    ValueError where ``job`` does not determine them.
    """
    model, splits_head = model_parts(job, vocabulary=rows), placement.splits_head
    parts = stage_parts(job, model, layers.by_stage(job, placement.stages), splits_head)
    shared = head_costs(job, model) if splits_head else None
    return Costs(
        tuple(part.costs() for part in parts),
        message=bytes_between_stages(job),
        head=shared,
        sequence=tuple(part.sequence for part in parts),
    )


def stage_seconds(job: Job, stages: int, rows: int, system: System, data: int) -> Costs:
    """Return the same in the seconds of ``system``, messages included, on ``data`` data-parallel ranks."""
    model = model_parts(job, SystemKernelSeconds(system, job), vocabulary=rows)
    parts = stage_parts(job, model, layers.by_stage(job, stages))
    parallel, size = job.parallel, message_bytes(job, model.hidden_bytes)
    apart = data * parallel.tensor_model_parallel_size * parallel.context_parallel_size
    link = system.message_link(parallel.pipeline_model_parallel_size, apart)
    stages_of = tuple(part.costs() for part in parts)
    sequence = tuple(part.sequence for part in parts)
    return Costs(stages_of, hop_seconds(job, system, link, size), size, sequence=sequence)


def hop_seconds(job: Job, system: System, link: Link, size: float) -> float:
    """Return the seconds of a message of ``size`` bytes on ``link``.

    Where tensor-parallel ranks send parts of it, they gather it afterwards.
    """
    if not job.parallel.divides_messages:
        return link.seconds(size)
    ranks = job.parallel.tensor_model_parallel_size
    return link.seconds(size / ranks) + system.gather_seconds(size, ranks)


def bytes_between_stages(job: Job) -> float:
    """Return the bytes of a message between stages, of the longest one where lengths vary."""
    return message_bytes(job, LayerCosts(job).hidden_bytes)
