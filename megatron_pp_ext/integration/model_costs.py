"""What the stages of a model cost, estimated from Megatron's arguments before anything is built.

Schedules are compiled from costs.  Where none were measured (--pipeline-costs), the arithmetic of the
layers stands in: seconds are proportional to floating-point operations and activations are counted
in bytes, per layer as in arXiv 2401.10241, table 3, generalised to grouped queries, gated MLPs and experts.
Messages are taken to cost nothing.
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_pp_ext.schedule.costs import Costs, StageCosts

_SECONDS_PER_OPERATION = 1e-15
"""Any constant does: a schedule depends on ratios alone.  This one is a petaflop a second."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Operations for one microbatch in matrix products with weights and without, and bytes kept.

    A weight product costs the same in F, I and W; a product of activations, such as attention's,
    costs double in I and nothing in W.
    """

    weight_operations: float = 0.0
    activation_operations: float = 0.0
    kept_until_input_gradient: float = 0.0
    kept_until_weight_gradient: float = 0.0

    def __add__(self, other: "_Part") -> "_Part":
        return _Part(
            self.weight_operations + other.weight_operations,
            self.activation_operations + other.activation_operations,
            self.kept_until_input_gradient + other.kept_until_input_gradient,
            self.kept_until_weight_gradient + other.kept_until_weight_gradient,
        )

    def times(self, count: int) -> "_Part":
        return _Part(
            self.weight_operations * count,
            self.activation_operations * count,
            self.kept_until_input_gradient * count,
            self.kept_until_weight_gradient * count,
        )

    def costs(self) -> StageCosts:
        return StageCosts(
            forward=(self.weight_operations + self.activation_operations) * _SECONDS_PER_OPERATION,
            input_gradient=(self.weight_operations + 2 * self.activation_operations) * _SECONDS_PER_OPERATION,
            weight_gradient=self.weight_operations * _SECONDS_PER_OPERATION,
            activation=self.kept_until_input_gradient + self.kept_until_weight_gradient,
            released_by_input_gradient=self.kept_until_input_gradient,
        )


def estimate(args: Namespace, stages: int) -> Costs:
    """The costs of ``args``'s model cut into ``stages`` stages, evenly or by its layout; hops are free."""
    layer, head = _layer(args), _head(args)
    # Embedding look-ups, residual additions and the like: little, but a stage without layers has some.
    other = _Part(weight_operations=_tokens(args) * args.hidden_size)
    parts = [layer.times(count) + other for count in _layers_by_stage(args, stages)]
    parts[-1] += head
    return Costs(tuple(part.costs() for part in parts))


def _tokens(args: Namespace) -> float:
    """Tokens of a microbatch that one rank works on."""
    return float(args.seq_length * args.micro_batch_size / args.context_parallel_size)


def _bytes(args: Namespace) -> int:
    return 2 if args.bf16 or args.fp16 else 4


def _layer(args: Namespace) -> _Part:
    """One transformer layer on one tensor-parallel rank."""
    hidden = args.hidden_size
    head_width = args.kv_channels or hidden // args.num_attention_heads
    query = head_width * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    inner = args.ffn_hidden_size or 4 * hidden
    if args.num_experts:
        inner = (args.moe_ffn_hidden_size or inner) * args.moe_router_topk
    gates = 2 if args.swiglu else 1
    weights = hidden * (query + 2 * groups * head_width) + query * hidden + (gates + 1) * hidden * inner
    tokens, share = _tokens(args), args.tensor_model_parallel_size
    input_bytes = tokens * hidden * _bytes(args)
    if args.recompute_granularity == "full":
        # The forward runs again at the start of I, which the input alone waits for.
        return _Part(2 * tokens * weights / share, 4 * tokens * args.seq_length * query / share, input_bytes)
    # W needs the input of every product; attention and the non-linearities are done with after I.
    kept_for_weights = 2 * hidden + query + inner
    kept_for_inputs = query + 2 * groups * head_width + gates * inner
    if args.attention_backend is not None and "unfused" in str(args.attention_backend):
        kept_for_inputs += 2 * args.seq_length * args.num_attention_heads
    return _Part(
        weight_operations=2 * tokens * weights / share,
        activation_operations=4 * tokens * args.seq_length * query / share,
        kept_until_input_gradient=tokens * kept_for_inputs * _bytes(args) / share + 2 * input_bytes,
        kept_until_weight_gradient=tokens * kept_for_weights * _bytes(args) / share,
    )


def _head(args: Namespace) -> _Part:
    """The output layer and the loss; the loss keeps probabilities in fp32."""
    vocabulary = (args.padded_vocab_size or args.vocab_size or 0) / args.tensor_model_parallel_size
    tokens = _tokens(args)
    return _Part(
        weight_operations=2 * tokens * args.hidden_size * vocabulary,
        kept_until_input_gradient=4 * tokens * vocabulary,
        kept_until_weight_gradient=tokens * args.hidden_size * _bytes(args),
    )


def _layers_by_stage(args: Namespace, stages: int) -> list[int]:
    if args.pipeline_model_parallel_layout is not None:
        by_stage = PipelineParallelLayerLayout.parse_str_to_list(args.pipeline_model_parallel_layout)
        return [sum(part.name == "decoder" for part in parts) for parts in by_stage]
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    even = [(args.num_layers + ends) // stages] * stages
    even[0] -= args.account_for_embedding_in_pipeline_split
    even[-1] -= args.account_for_loss_in_pipeline_split
    return even
