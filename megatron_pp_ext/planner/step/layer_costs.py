"""The costs of the parts of a transformer for one microbatch on one tensor-parallel rank.

Operations follow arXiv 2401.10241, table 3, generalised to grouped queries, gated MLPs and experts.  Bytes
are those that autograd saves and that deferred weight gradients hold on to, without the small ones (the
statistics of norms, masks, indices); ``tests/integration/test_model_costs.py`` compares them with those that
the activation meter counts.  Under FP8 the inputs of products, and the operands that wait for W, are counted
as one quantized copy, a byte for each number, and everything else as without FP8.
"""

from argparse import Namespace
from dataclasses import replace

from megatron_pp_ext.planner.step.kernel_seconds import KernelSeconds
from megatron_pp_ext.planner.step.model_part import Part
from megatron_pp_ext.planner.step.product_costs import ActivationSizes, ProductCosts

_FUSED_KERNELS, _UNFUSED_KERNELS, _MLP_KERNELS, _ROUTER_KERNELS = 11, 16, 8, 25
"""The kernels that a forward starts: those of attention with its projections, fused or not, of an MLP, and
of routing and ordering tokens.  They are counted roughly; what is fitted is their product with the system's
``kernel_seconds``."""


class LayerCosts:
    """The costs of the parts of the model that ``args`` describe, with the seconds of ``kernels``."""

    def __init__(self, args: Namespace, kernels: KernelSeconds | None = None) -> None:
        self._args = args
        self._kernels = kernels or KernelSeconds()
        self._sizes = ActivationSizes(args)
        self._products = ProductCosts(args, self._sizes, self._kernels)
        self._gates = 2 if args.swiglu else 1
        self._is_unfused = args.transformer_impl == "local" or "unfused" in str(args.attention_backend)
        is_selective = args.recompute_granularity == "selective"
        self._recomputed = set(args.recompute_modules or ["core_attn"]) if is_selective else set()

    @property
    def hidden_bytes(self) -> float:
        """The bytes of one activation of the hidden size, which only sequence parallelism divides."""
        return self._sizes.hidden_bytes

    def other(self) -> Part:
        """Return the small costs that every stage has, even without layers, such as residual additions."""
        operations = self._sizes.tokens * self._sizes.hidden
        seconds = self._kernels.addition(operations)
        return Part(
            weight_operations=operations,
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            weight_gradient_seconds=seconds,
        )

    def attention(self) -> Part:
        """Return self-attention with its norm and its projections."""
        args = self._args
        head_width = args.kv_channels or self._sizes.hidden // args.num_attention_heads
        query = head_width * args.num_attention_heads
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        projected = query + 2 * groups * head_width
        core = self._core(query, 2 * groups * head_width)
        if "core_attn" in self._recomputed:
            core = core.recomputed(kept=0)
        # Attention in single products repeats keys and values for every query.
        kept = Part(after_forward=self._sizes.cut(query + (3 * query if self._is_unfused else projected)))
        if self._sizes.waiting < 1:
            # Beside what attention keeps of its output there is the quantized copy of the product behind it.
            kept += Part(after_forward=self._sizes.waiting * self._sizes.cut(query))
        whole = (
            self._norm()
            + self._products.column(projected)
            + core
            + kept
            + self._products.row(query)
            + self._dropped()
        )
        return self._kernels.launched(whole, _UNFUSED_KERNELS if self._is_unfused else _FUSED_KERNELS)

    def mlp(self) -> Part:
        """Return a dense MLP and its norm."""
        inside = self._feed_forward(self._inner())
        inside = inside.recomputed(kept=0) if "mlp" in self._recomputed else inside
        return self._kernels.launched(self._norm() + inside + self._dropped(), _MLP_KERNELS)

    def experts(self) -> Part:
        """Return a layer of experts, with the shared one if there is one, and its norm.

        The router is taken to send every expert the same number of tokens; its own cost is left out.
        """
        args = self._args
        chosen = args.moe_router_topk
        inner = args.moe_ffn_hidden_size or self._inner()
        here = args.num_experts // args.expert_model_parallel_size
        inside = self._routed(self._feed_forward(inner, copies=chosen, experts=here))
        if not args.swiglu:
            # The activation before it is scaled by the router's probabilities.
            inside += Part(after_forward=self._sizes.cut(chosen * inner))
        if "moe_act" in self._recomputed:
            inside = inside.recomputed(kept=inside.after_forward - self._sizes.cut(chosen * inner))
        if args.moe_shared_expert_intermediate_size:
            shared = self._feed_forward(args.moe_shared_expert_intermediate_size)
            inside += shared.recomputed(kept=0) if "shared_experts" in self._recomputed else shared
        inside = inside.recomputed(kept=0) if "moe" in self._recomputed else inside
        kernels = _MLP_KERNELS * (2 if args.moe_grouped_gemm else 1 + here) + _ROUTER_KERNELS
        return self._kernels.launched(self._norm() + inside + self._dropped(), kernels)

    def prediction(self) -> Part:
        """Return the projection of embedding and hidden state in one depth of multi-token prediction."""
        kept = self.hidden_bytes
        joined = self._products.column(self._sizes.hidden).times(2)
        return replace(joined, after_forward=4 * kept, after_input_gradient=3 * kept * self._sizes.waiting)

    def table(self, vocabulary: int) -> Part:
        """Return the rows of the embedding; a look-up is not counted."""
        return Part(parameters=vocabulary * self._sizes.hidden / self._sizes.share)

    def positions(self) -> Part:
        """Return the weights of learned positions, and the mask of the dropout behind the embedding."""
        learned = getattr(self._args, "position_embedding_type", None) == "learned_absolute"
        positions = (self._args.max_position_embeddings or 0) * self._sizes.hidden if learned else 0
        return self._dropped() + Part(parameters=positions)

    def last_norm(self) -> Part:
        """Return the norm in front of the output layer."""
        return self._norm()

    def output(self, vocabulary: int) -> Part:
        """Return the output layer and the loss, which keeps probabilities in fp32."""
        probabilities = 4 * self._sizes.tokens * vocabulary / self._sizes.share
        # Logits are read, converted to fp32, and passed over for their maximum, exponential and sum.
        loss = Part(
            forward_seconds=self._kernels.copy(4 * probabilities),
            input_gradient_seconds=self._kernels.copy(2 * probabilities),
            after_forward=probabilities,
        )
        return self._products.output(vocabulary) + loss

    def loss_workspace(self, vocabulary: int) -> float:
        """Return the temporary bytes of the loss: logits as the product makes them, and a copy in fp32."""
        return (self._sizes.bytes + 4) * self._sizes.tokens * vocabulary / self._sizes.share

    def _inner(self) -> int:
        """Return the width of an MLP; if none is given, Megatron's default.

        It is 4 times the hidden size, or two thirds of that, in multiples of 64, for a gated MLP.
        """
        if self._args.ffn_hidden_size:
            return int(self._args.ffn_hidden_size)
        return 8 * self._sizes.hidden // 3 // 64 * 64 if self._args.swiglu else 4 * self._sizes.hidden

    def _core(self, query: int, keys_and_values: int) -> Part:
        """Return attention itself; meanwhile the keys and values of other context-parallel ranks arrive."""
        args = self._args
        operations = 4 * self._sizes.tokens * args.seq_length * query / self._sizes.share
        scores = self._sizes.tokens * args.seq_length * args.num_attention_heads / self._sizes.share
        forward, backward = self._kernels.attention(
            operations,
            self._sizes.bytes * scores,
            not self._is_unfused,
            args.seq_length / args.context_parallel_size,
        )
        around = self._sizes.cut(keys_and_values)
        results, gradients = (
            self._sizes.tokens * width / self._sizes.share for width in (query, query + keys_and_values)
        )
        rotated = query + keys_and_values / 2 if args.position_embedding_type == "rope" else 0
        if self._is_unfused:
            rotated += query + keys_and_values  # put in the order of heads
        turning = self._kernels.copy(2 * self._sizes.cut(rotated))
        return Part(
            activation_operations=operations,
            forward_seconds=self._kernels.ring(forward, around, results) + turning,
            input_gradient_seconds=self._kernels.ring(backward, 2 * around, gradients) + turning,
            after_forward=self._kept_scores(scores),
        )

    def _kept_scores(self, scores: float) -> float:
        """Return the bytes of attention's probabilities, which fused kernels do not keep."""
        if not self._is_unfused:
            return 0.0
        has_dropout = self._args.attention_dropout > 0
        # Dropout also keeps its result, and a mask of a byte for each probability.
        return scores * (self._sizes.bytes * (1 + has_dropout) + has_dropout)

    def _norm(self) -> Part:
        """Return a norm and the addition to the residual stream.

        The norm keeps its input, and the layer after it keeps the norm's output unless that is recomputed.
        """
        kept = 1 if "layernorm" in self._recomputed else 1 + self._sizes.waiting
        # The norm reads and writes, the addition reads two and writes one; their backwards likewise.
        seconds = self._kernels.copy(5 * self.hidden_bytes)
        parameters = self._sizes.hidden * (1 if self._args.normalization == "RMSNorm" else 2)
        return Part(
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            after_forward=kept * self.hidden_bytes,
            parameters=parameters,
        )

    def _dropped(self) -> Part:
        """Return the mask of the dropout after embedding, attention or MLP, a byte for each number."""
        return Part(
            after_forward=self.hidden_bytes / self._sizes.bytes if self._args.hidden_dropout > 0 else 0.0
        )

    def _feed_forward(self, inner: int, copies: int = 1, experts: int = 1) -> Part:
        """Return both products of an MLP and its activation function, for ``copies`` times the tokens.

        These are spread over ``experts`` of this rank.
        """
        through = copies * self._sizes.cut((self._gates + 1) * inner)
        activation = Part(
            forward_seconds=self._kernels.copy(through),
            input_gradient_seconds=self._kernels.copy(
                through + copies * self._sizes.cut(self._gates * inner)
            ),
            after_forward=copies * self._sizes.cut((self._gates + self._sizes.waiting) * inner),
        )
        into = self._products.column(self._gates * inner, copies, experts)
        return into + activation + self._products.row(inner, copies, experts)

    def _routed(self, one: Part) -> Part:
        """Return the MLP ``one`` as a rank's experts: with the routing, and the weights of each expert."""
        args = self._args
        sent = args.moe_router_topk * self.hidden_bytes
        # Tokens travel to the experts and back, and are put in order before and after either way.
        exchange = self._kernels.shuffle(sent)
        moving = 2 * exchange + self._kernels.copy(8 * sent)
        here = args.num_experts / args.expert_model_parallel_size
        share = self._sizes.share / (args.expert_tensor_parallel_size or self._sizes.share)
        return replace(
            one,
            forward_seconds=one.forward_seconds + moving,
            input_gradient_seconds=one.input_gradient_seconds + moving,
            after_forward=one.after_forward + sent,
            parameters=0.0,
            expert_parameters=one.parameters * share * here,
            fp8_parameters=one.fp8_parameters * share * here,
            exchanged_seconds=exchange,
        )
