"""Computes the costs of a model's stages from Megatron's arguments alone."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from megatron_pp_ext.job.layers import pattern, predicting_stage
from megatron_pp_ext.planner.step.layer_costs import LayerCosts
from megatron_pp_ext.planner.step.model_part import Part
from megatron_pp_ext.schedule.costs import VocabularyCosts


@dataclass(frozen=True, slots=True)
class Pieces:
    """The parts of a whole model, from which any number of stages can be cut.

    ``layers`` are in order, and equal ones are one object; ``other`` is what every stage has beside them.
    ``table`` and ``output`` are the embedding's rows and the output layer with the loss, ``positions`` and
    ``last_norm`` what the end stages have beside these.  ``hidden_bytes`` are those of one activation between
    layers, ``loss_workspace`` the temporary bytes of the loss.
    ``stages`` are the sums of stages that were cut, by how they are recomputed and by their layers.
    ``kinds`` tells layers apart: equal ones have the same number.
    """

    layers: tuple[Part, ...]
    other: Part
    table: Part
    positions: Part
    last_norm: Part
    output: Part
    prediction: Part
    hidden_bytes: float
    loss_workspace: float
    stages: dict[tuple[object, ...], Part] = field(default_factory=dict, compare=False, repr=False)
    kinds: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(map(id, self.layers)))

    @property
    def head(self) -> Part:
        """The end of the model: the last norm, the output layer and the loss."""
        return self.last_norm + self.output


def pieces(args: Namespace, costs: LayerCosts, vocabulary: int) -> Pieces:
    """Return the parts of ``args``'s model; ValueError for layers whose costs are not known."""
    return Pieces(
        layers=tuple(_layers(args, costs)),
        other=costs.other(),
        table=costs.table(vocabulary),
        positions=costs.positions(),
        last_norm=costs.last_norm(),
        output=costs.output(vocabulary),
        prediction=costs.prediction(),
        hidden_bytes=costs.hidden_bytes,
        loss_workspace=costs.loss_workspace(vocabulary),
    )


def every_token(args: Namespace, model: Pieces) -> float:
    """Return the bytes of the hidden states of all tokens, which sequence parallelism divides elsewhere."""
    return model.hidden_bytes * (args.tensor_model_parallel_size if args.sequence_parallel else 1)


def vocabulary_part(args: Namespace, model: Pieces) -> Part:
    """Return a rank's part of the vocabulary that the pipeline's ranks share.

    From S to T a rank keeps its exponentials, and the hidden states of all tokens twice: as they came and
    their gradient's part.  A tied weight exists once.
    """
    ranks, output = args.pipeline_model_parallel_size, model.output
    exponentials = max(0.0, output.after_input_gradient - model.hidden_bytes) / ranks
    rows = output.parameters
    if args.untie_embeddings_and_output_weights:
        rows += model.table.parameters
    return Part(
        weight_operations=output.weight_operations / ranks,
        forward_seconds=output.forward_seconds / ranks,
        input_gradient_seconds=output.input_gradient_seconds / ranks,
        weight_gradient_seconds=output.weight_gradient_seconds / ranks,
        after_forward=exponentials + 2 * every_token(args, model),
        parameters=rows / ranks,
    )


def shared_vocabulary(args: Namespace, model: Pieces, hop: float = 0.0) -> VocabularyCosts:
    """Return the costs of ``vocabulary_part``, as a schedule takes them.

    An S does the part's forward and its part of the input gradient.  A ``hop`` is that of a message between
    stages.
    """
    part = vocabulary_part(args, model)
    alone = VocabularyCosts(
        scores=part.forward_seconds + part.input_gradient_seconds,
        weight_gradient=part.weight_gradient_seconds,
        activation=part.after_forward,
    )
    return alone.exchanged_over(hop)


def stage_parts(
    args: Namespace, model: Pieces, layers_by_stage: Sequence[int], shares_vocabulary: bool = False
) -> list[Part]:
    """Return the costs of each stage of ``model``, given the layers of each; equal stages are one object.

    The embedding is in the first stage; the output layer and the losses are in the last, and so is
    multi-token prediction unless a layout puts it, with its copy of the embedding, elsewhere.  With
    ``shares_vocabulary`` the embedding's rows, the output layer and the loss are in none.
    """
    ends = list(accumulate(layers_by_stage))
    how = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    sums = []
    for start, end in zip([0, *ends], ends, strict=False):
        key = *how, *model.kinds[start:end]
        if key not in model.stages:
            layers = _recomputed(args, model.hidden_bytes, model.layers[start:end])
            model.stages[key] = _sum(layers) + model.other
        sums.append(model.stages[key])
    for first, last in end_parts(model, shares_vocabulary):
        sums[0] += first
        sums[-1] += last
    predicting = predicting_stage(args, len(sums))
    if predicting is not None:
        predicted, losses = prediction_parts(args, model)
        sums[predicting] += predicted
        sums[-1] += losses
    return sums


def end_parts(model: Pieces, shares_vocabulary: bool) -> list[tuple[Part, Part]]:
    """Return what the first and the last stage have beside their layers."""
    ends = [(model.positions, model.last_norm)]
    return ends if shares_vocabulary else [*ends, (model.table, model.output)]


def prediction_parts(args: Namespace, model: Pieces) -> tuple[Part, Part]:
    """Return what multi-token prediction adds to its stage, and to the last one."""
    depths = args.mtp_num_layers or 0
    copies = Part(parameters=model.head.parameters)
    predicted = (model.prediction + model.layers[-1] + copies).times(depths)
    return predicted, replace(model.head, parameters=0).times(depths)


def kept_input(args: Namespace, hidden_bytes: float) -> float:
    """Return the bytes that a group of recomputed layers keeps, of an input of ``hidden_bytes``."""
    return hidden_bytes / (args.tensor_model_parallel_size if args.distribute_saved_activations else 1)


def _sum(parts: Sequence[Part]) -> Part:
    total = Part()
    for _, run in groupby(parts, key=id):
        same = list(run)
        total += same[0].times(len(same))
    return total


def _layers(args: Namespace, costs: LayerCosts) -> list[Part]:
    """Return the layers of the model in order; equal ones are one object."""
    letters = pattern(args)
    if letters is None:
        has_experts = _experts_by_layer(args)
        attention = costs.attention()
        kinds = {True: costs.experts, False: costs.mlp}
        behind = {kind: kinds[kind]() for kind in set(has_experts)}
        made = {
            kind: attention + replace(one, hidden_in_pair=hidden_in_pair(attention, one))
            for kind, one in behind.items()
        }
        return [made[kind] for kind in has_experts]
    known = {"*": costs.attention, "-": costs.mlp, "E": costs.experts}
    unknown = sorted(set(letters) - set(known) - {"|"})
    if unknown:
        raise ValueError(
            f"cannot estimate the layers {' '.join(unknown)} of --hybrid-layer-pattern; measure the stages "
            "and give --pipeline-costs"
        )
    parts = {letter: known[letter]() for letter in set(letters) - {"|"}}
    return [parts[letter] for letter in letters if letter != "|"]


def hidden_in_pair(attention: Part, mlp: Part) -> float:
    """Return the seconds that a pair of a forward and a backward of one layer hides.

    Megatron runs an exchange of tokens beside each of four computations: the attention of the forward, the
    experts of either half, and the attention of the backward (``TransformerLayerSchedulePlan.run`` in
    megatron.core.models.common.model_chunk_schedule_plan).  What is longer than its computation is not
    hidden.
    """
    exchange = mlp.exchanged_seconds
    computations = (
        attention.forward_seconds,
        mlp.forward_seconds - 2 * exchange,
        mlp.backward_seconds - 2 * exchange,
        attention.backward_seconds,
    )
    return sum(min(exchange, max(0.0, seconds)) for seconds in computations)


def _experts_by_layer(args: Namespace) -> list[bool]:
    if not args.num_experts:
        return [False] * args.num_layers
    every = args.moe_layer_freq
    if isinstance(every, list):
        return [bool(has_experts) for has_experts in every]
    return [layer % every == 0 for layer in range(args.num_layers)]


def _recomputed(args: Namespace, hidden_bytes: float, stage: Sequence[Part]) -> Sequence[Part]:
    """Return the layers of a stage; full recomputation puts them in groups that keep only their input."""
    if args.recompute_granularity != "full" or not stage:
        return stage
    size = args.recompute_num_layers or 1
    whole: Sequence[Part] = []
    if args.recompute_method == "block":
        stage, whole, size = stage[:size], stage[size:], 1
    kept = kept_input(args, hidden_bytes)
    groups = [stage[start : start + size] for start in range(0, len(stage), size)]
    made = {key: _sum(group).recomputed(kept) for group in groups for key in (tuple(map(id, group)),)}
    return [*(made[tuple(map(id, group))] for group in groups), *whole]
