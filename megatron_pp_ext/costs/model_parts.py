"""The parts of a whole model: its layers in order, and what is around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_pp_ext.costs import ends
from megatron_pp_ext.costs.attention import KINDS, Attentions, self_attention
from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.mamba import mamba
from megatron_pp_ext.costs.mlp import experts, mlp, routing
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.job.parts import Half, LayerBlock
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.costs import Costs, part_of_pair


def overlapped(attention: Part, mlp: Part, processors: float = 1.0) -> float:
    """Return the seconds that a pair of a forward and a backward of one layer hides.

    Megatron runs an exchange of tokens with each of four computations: the attention of the forward, the
    experts of either half, and the attention of the backward (``TransformerLayerSchedulePlan.run`` in
    megatron.core.models.common.model_chunk_schedule_plan).  An exchange longer than its computation is
    not hidden whole, and a computation slows down while an exchange leaves it ``processors``, a part of all.
    """
    exchange = mlp.exchanged_seconds
    computations = (
        attention.forward_seconds,
        mlp.forward_seconds - 2 * exchange,
        mlp.backward_seconds - 2 * exchange,
        attention.backward_seconds,
    )
    return sum(min(processors * exchange, max(0.0, seconds)) for seconds in computations)


def pair(job: Job, parts: Sequence[Part]) -> float:
    """Return ``Costs.pair``, on average over the ``parts`` of ``job``."""
    if not job.parallel.overlap_moe_expert_parallel_comm:
        return 1.0
    alone = sum(part.forward_seconds + part.backward_seconds for part in parts)
    return part_of_pair(sum(part.overlapped_together for part in parts), alone)


_LINEAR_KERNELS = 4
"""The kernels that a forward starts; see ``mlp.MLP_KERNELS``."""


def block(costs: LayerCosts, described: LayerBlock) -> Part:
    """Return a layer as ``described``.

    Models of such layers are found by neural architecture search (arXiv 2411.19146, section 2.1).
    """
    groups = {"num_query_groups": described.attention.size, "group_query_attention": True}
    width = {"ffn_hidden_size": described.mlp.size}
    return _half(costs, described.attention, self_attention, groups) + _half(costs, described.mlp, mlp, width)


def _half(
    costs: LayerCosts, described: Half, itself: Callable[[LayerCosts], Part], sizes: dict[str, Any]
) -> Part:
    if described.is_left_out:
        return Part()
    if described.is_linear:
        return _linear(costs)
    return itself(costs.of(**sizes) if described.size else costs)


def _linear(costs: LayerCosts) -> Part:
    """Return a product of the hidden size with itself, whose result is gathered, and its norm.

    Under sequence parallelism every rank then keeps a part of the tokens
    (megatron.core.transformer.heterogeneous.linear_replacements).
    """
    sizes = costs.sizes
    gathering = costs.kernels.gather(sizes.whole(sizes.hidden)) if sizes.share > 1 else 0.0
    again = gathering if costs.job.parallel.sequence_parallel else 0.0
    gathered = Part(forward_seconds=gathering, input_gradient_seconds=again)
    whole = costs.norm() + costs.products.column(sizes.hidden) + gathered + costs.dropped()
    return costs.kernels.launched(whole, _LINEAR_KERNELS)


_KINDS = {"-": ("mlp", mlp), "E": ("moe", experts), "M": ("mamba", mamba)}
"""The layers without attention whose costs are known, by their letters in --hybrid-layer-pattern: Megatron's
name of the module, and the function that counts one."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a whole model, from which any number of stages can be cut.

    ``layers`` are in order, and equal ones are one object; ``other`` is the part of every stage besides them.
    ``table`` and ``output`` are the embedding's rows and the output layer with the loss, ``positions`` and
    ``last_norm`` what the end stages have besides these, ``prediction`` one depth of multi-token prediction
    without its output layer.  ``hidden_bytes`` are those of one activation between
    layers, ``loss_workspace`` the temporary bytes of the output layer and the loss, ``split_workspace`` those
    of a head that ranks split.  ``buffers`` are the bytes of tensors that libraries make once for all layers
    and microbatches, ``output_buffer`` those that are made for the output layer, and ``gather_buffers`` those
    in which W gathers operands, where backwards come in two halves (``costs.ends``).
    ``deferred`` is the part of the output layer that --defer-embedding-wgrad-compute may leave to the end of
    a step, for a microbatch: the product for the weight gradient, and its operands.
    ``captured`` is what Transformer Engine's CUDA graphs, if there are any, capture of each layer.
    ``to_host`` are the seconds in which a byte goes to the host, if --cpu-offloading-num-layers copies any.
    ``stages`` are the sums of stages that were cut, by how they are recomputed and by their layers.
    ``kinds`` numbers the kinds of layers: equal ones have the same number.

    ``measured`` are the costs of measured stages, None where all costs follow from formulas.
    Where their parameters are among them, the layers need no formulas, and there are none here.
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
    split_workspace: float = 0.0
    buffers: float = 0.0
    output_buffer: float = 0.0
    gather_buffers: float = 0.0
    measured: Costs | None = None
    deferred: Part = field(default_factory=Part)
    to_host: float = 0.0
    captured: tuple[Part, ...] = ()
    stages: dict[tuple[object, ...], Part] = field(default_factory=dict, compare=False, repr=False)
    kinds: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(map(id, self.layers)))

    @property
    def counts_weights(self) -> bool:
        """Whether the weights of all stages were counted where they were measured."""
        return self.measured is not None and self.measured.has_parameters

    @property
    def head(self) -> Part:
        """The end of the model: the last norm, the output layer and the loss."""
        return self.last_norm + self.output


def model_parts(
    job: Job,
    kernels: KernelSeconds | None = None,
    vocabulary: int | None = None,
    measured: Costs | None = None,
) -> ModelParts:
    """Return the parts of ``job``'s model; ValueError for layers whose costs are not known.

    Seconds come from ``kernels``, or are in proportion to operations.  ``vocabulary`` are the rows of the
    embedding, which follow from ``job`` if it is left out.  ``measured`` are the costs of measured stages.
    """
    costs = LayerCosts(job, kernels)
    rows = job.padded_vocabulary if vocabulary is None else vocabulary
    has_own_layers = measured is None or not measured.has_parameters
    layers = _layers(costs) if has_own_layers else []
    captured = layers if job.precision.cuda_graph_impl == "transformer_engine" else []
    if captured and job.precision.graphed_modules:
        captured = _layers(costs, job.precision.graphed_modules)
    output, deferred = ends.output(costs, rows), Part()
    if job.defers_embedding:
        deferred = Part(
            weight_gradient_seconds=output.weight_gradient_seconds,
            overlapped_in_whole=output.overlapped_in_whole,
            after_input_gradient=output.after_input_gradient,
        )
        output = replace(output, weight_gradient_seconds=0.0, overlapped_in_whole=0.0, gathering=0.0)
    prediction = _prediction(costs, layers) if job.model.mtp_num_layers else Part()
    # Buffers are those of all products that have been made, so they come last.
    made_once = ends.of_layers(costs)
    return ModelParts(
        layers=tuple(layers),
        other=costs.other(),
        table=ends.table(costs, rows),
        positions=ends.positions(costs),
        last_norm=costs.norm(is_recomputed=False),
        output=output,
        prediction=prediction,
        hidden_bytes=costs.hidden_bytes,
        loss_workspace=ends.loss_workspace(costs, rows) + ends.gathered(costs),
        split_workspace=ends.split_workspace(costs, rows),
        buffers=made_once,
        output_buffer=ends.of_output(costs, rows),
        gather_buffers=ends.of_gathers(costs),
        measured=measured,
        deferred=deferred,
        captured=tuple(captured),
        to_host=costs.kernels.to_host(1.0) if job.memory.cpu_offloading_num_layers else 0.0,
    )


_NOTHING = Part()


class _Modules:
    """The ``modules`` of layers by Megatron's names (--cuda-graph-modules), or all; others cost nothing."""

    def __init__(self, costs: LayerCosts, modules: frozenset[str] = frozenset()) -> None:
        self._costs, self._modules = costs, modules
        self._attentions = Attentions(costs)

    def has(self, module: str) -> bool:
        return not self._modules or module in self._modules

    def attention(self, number: int, letter: str | None = None) -> Part:
        """Return the attention of layer ``number``, of a kind by its ``letter`` if there is one."""
        return self._attentions.layer(number, letter) if self.has("attn") else _NOTHING

    def other(self, letter: str) -> Part:
        """Return a layer without attention by its ``letter``."""
        if letter == "E" and not self.has("moe"):
            return routing(self._costs) if self.has("moe_router") else _NOTHING
        module, function = _KINDS[letter]
        return function(self._costs) if self.has(module) else _NOTHING

    def block(self, described: LayerBlock) -> Part:
        """Return a layer as ``described``."""
        absent = Half(is_left_out=True)
        attention = described.attention if self.has("attn") else absent
        return block(self._costs, LayerBlock(attention, described.mlp if self.has("mlp") else absent))


def _layers(costs: LayerCosts, only: frozenset[str] = frozenset()) -> list[Part]:
    """Return the layers of the model in order; equal ones are one object.

    With ``only`` they have these modules alone, by Megatron's names.
    """
    model, modules = costs.job.model, _Modules(costs, only)
    if model.pattern is not None:
        return _of_pattern(modules, model.pattern.replace("|", ""))
    if model.blocks:
        if len(model.blocks) != model.num_layers:
            raise ValueError(
                f"--num-layers is {model.num_layers}, but --heterogeneous-layers-config-path describes "
                f"{len(model.blocks)} layers: correct one of them"
            )
        described = {kind: modules.block(kind) for kind in set(model.blocks)}
        return [described[kind] for kind in model.blocks]
    second_halves = {kind: modules.other("E" if kind else "-") for kind in set(model.has_experts)}
    halves = [
        (modules.attention(number), second_halves[kind]) for number, kind in enumerate(model.has_experts, 1)
    ]
    processors = costs.kernels.left_beside_exchange
    pairs = {(id(front), id(back)): (front, back) for front, back in halves}
    layers = {key: _joined(*pair, processors) for key, pair in pairs.items()}
    return [layers[id(front), id(back)] for front, back in halves]


def _joined(attention: Part, mlp: Part, processors: float) -> Part:
    return attention + replace(mlp, overlapped_together=overlapped(attention, mlp, processors))


def _of_pattern(modules: _Modules, letters: str) -> list[Part]:
    unknown = sorted(set(letters) - {*_KINDS, *KINDS})
    if unknown:
        raise ValueError(
            f"cannot estimate the layers {' '.join(unknown)} of --hybrid-layer-pattern; measure the stages "
            'with mpp rehearse --costs FILE, which counts their "parameters" too, and give '
            "--pipeline-costs FILE"
        )
    parts = {letter: modules.other(letter) for letter in set(letters) & set(_KINDS)}
    return [
        parts.get(letter) or modules.attention(number, letter) for number, letter in enumerate(letters, 1)
    ]


def _prediction(costs: LayerCosts, layers: Sequence[Part]) -> Part:
    """Return an MTP depth, with the layers of its pattern, or else one like the model's last.

    Full recomputation keeps both of its inputs, but not where it covers a stage's first layers
    (``MultiTokenPredictionLayer`` in megatron.core.transformer), nor in pairs.
    """
    pattern, memory = costs.job.model.predicting_pattern, costs.job.memory
    layer_parts = _of_pattern(_Modules(costs), pattern) if pattern else layers[-1:]
    depth = sum(layer_parts, ends.prediction(costs))
    in_pairs = costs.job.parallel.overlap_moe_expert_parallel_comm
    if memory.recomputes_layers and not memory.recomputes_first and not in_pairs:
        # The input of the norm after, which the head has, is not kept besides both.
        return depth.recomputed(after_forward=costs.hidden_bytes)
    return depth
