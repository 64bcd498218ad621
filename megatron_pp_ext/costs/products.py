"""The costs of products with weights and of the collectives around them, on one tensor rank."""

from typing import Any

from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.part import Matrices, Part
from megatron_pp_ext.job.typed_job import Job, Memory


def matrix(memory: Memory, rows: float, columns: float) -> Part:
    """Return a rank's part of a weight, ``rows`` times ``columns``, as an optimizer of matrices sees it.

    An iteration of Muon has the products X X^T, A A and B X, where X has the shorter side first
    (``newton_schulz_step`` in emerging_optimizers.orthogonalized_optimizers.muon_utils).  A weight that joins
    queries, keys and values counts as one matrix, though Muon takes it apart by default.

    Source: Keller Jordan, Muon (kellerjordan.github.io/posts/muon); arXiv 2502.16982 for language models.
    """
    if not memory.treats_matrices_apart:
        return Part()
    short, long = sorted((rows, columns))
    operations = 4 * short**2 * long + 2 * short**3
    return Part(matrices=Matrices(rows * columns, operations, 0.0, operations))


_SCALED_TOGETHER = {"blockwise": 128, "mxfp8": 32, "fp4": 16}
"""How many tokens share a scale in operands that are not scaled by tensor."""


class ActivationSizes:
    """The sizes of the activations of one microbatch on a tensor-parallel rank.

    A number has ``bytes``, and ``waiting`` times as many where it is kept as the operand of a product.
    """

    def __init__(self, job: Job) -> None:
        parallel = job.parallel
        self.tokens = job.model.seq_length * job.batch.micro_batch_size / parallel.context_parallel_size
        self.bytes = job.precision.weight_size
        self.waiting = job.precision.operand_size / self.bytes
        self.share = parallel.tensor_model_parallel_size
        self.expert_share = parallel.expert_tensor
        self.hidden = job.model.hidden_size
        self._whole_tokens = self.tokens * self.bytes
        self._spread_tokens = self._whole_tokens / parallel.sequence_ranks
        self.hidden_bytes = self.spread(self.hidden)

    def whole(self, width: float) -> float:
        """Return the bytes of an activation of ``width`` that every tensor-parallel rank has."""
        return self._whole_tokens * width

    def spread(self, width: float) -> float:
        """Return the bytes of an activation of ``width`` whose tokens sequence parallelism divides."""
        return self._spread_tokens * width

    def routed(self, width: float) -> float:
        """Return the bytes of an activation of ``width`` at the experts, if each token went to one of them.

        The tensor-parallel ranks of an expert gather the tokens of all of them.
        """
        return self.whole(width) * self.expert_share / self.share

    def cut(self, width: float) -> float:
        """Return the bytes of an activation of ``width`` that tensor parallelism divides."""
        return self.tokens * width * self.bytes / self.share


class ProductCosts:
    """Products with weights, for ``job``.

    ``copies`` stand for as many times the tokens, which so many ``experts`` of the rank share; None where the
    product is no expert's.  Without ``is_biased`` a product has a bias where the job's linear layers do.

    Under sequence parallelism a column-parallel product gathers its input, and a row-parallel one the
    gradient of its output.  For W a rank keeps its own part of either, and gathers it again while the product
    before is computed.  ``waits_gathered`` is whether all of it is kept: where the tokens of a rank are no
    multiple of the tokens that share a scale, nobody gathers quantized numbers (module/linear.py).

    ``largest_gathered`` are the bytes of the largest operand that is gathered again.

    Operations follow arXiv 2401.10241, table 3, generalised to grouped queries, gated MLPs and experts.
    Bytes are the tensors that autograd saves and that deferred weight gradients hold, without the small ones
    (the statistics of norms, masks, indices); ``tests/megatron/test_model_costs.py`` compares them with
    the activation meter's count.  Under FP8 the inputs of products, and the operands that wait for W, are
    counted as one quantized copy, a byte for each number, and everything else as without FP8.
    """

    def __init__(self, job: Job, sizes: ActivationSizes, kernels: KernelSeconds) -> None:
        self._sizes, self._kernels = sizes, kernels
        self._is_cut, self._has_biases = job.parallel.sequence_parallel, job.model.add_bias_linear
        self._sequence_ranks = job.parallel.sequence_ranks
        self._overlaps_reduce = job.parallel.async_tensor_model_parallel_allreduce
        self._is_fp8, self._gradient = job.precision.uses_fp8, job.precision.gradient_size
        self._is_local = job.precision.transformer_impl == "local"
        self._memory = job.memory
        self._fuses = job.precision.gradient_accumulation_fusion
        self._is_grouped = job.precision.moe_grouped_gemm
        self._fuses_experts = job.precision.fuses_experts
        self.shapes: set[tuple[float, float]] = set()
        """The shapes of a rank's weights that layers' products were made with, each one once."""
        self.waits_gathered = self._is_cut and _keeps_gathered(job, sizes)
        self.keeps_copies = self._is_cut and not self._is_local
        """Whether the own part of a gathered operand, of a layer without a norm, is a copy."""
        self.largest_gathered = 0.0

    def column(
        self,
        width: int,
        copies: float = 1,
        experts: int | None = None,
        read: int | None = None,
        is_biased: bool | None = None,
        is_normed: bool = False,
    ) -> Part:
        """Return the product from a width of ``read``, or the hidden size, to ``width``, which ranks share.

        Transformer Engine computes it with the norm before it, if it ``is_normed``.
        The ranks of an expert gather its tokens before it, and scatter the sums of their gradients; neither
        is hidden.  Under sequence parallelism the input is gathered, once more after I's product for W, and
        I's result is scattered; without it, I's results are summed.  Either runs while W computes where the
        backward is whole.
        """
        read = read or self._sizes.hidden
        operands = self._gathered_operand(read, experts) + self._sizes.cut(width)
        product = self._product(
            read,
            width / self._share(experts),
            operands,
            copies,
            experts,
            is_biased,
            parts=(self._operand_parts(experts), 1),
            is_normed=is_normed,
            is_cast=(True, not self._fuses_experts or experts is None),
        )
        if experts is not None:
            return product + self._dispatched(copies * self._sizes.routed(read))
        return self._in_column(
            product, copies * self._sizes.whole(read), is_operand=True, is_normed=is_normed
        )

    def output(self, vocabulary: int) -> Part:
        """Return the output layer, which has no bias and is not computed in FP8."""
        sizes = self._sizes
        operands = sizes.hidden_bytes + sizes.cut(vocabulary)
        product = self._product(
            sizes.hidden, vocabulary / sizes.share, operands, is_biased=False, is_output=True
        )
        return self._in_column(product, sizes.whole(sizes.hidden), is_operand=False)

    def row(
        self,
        width: int,
        copies: float = 1,
        experts: int | None = None,
        result: int | None = None,
        is_biased: bool | None = None,
    ) -> Part:
        """Return the product from ``width``, which ranks share, to a width of ``result``, or the hidden size.

        Its results are summed, an expert's by a dispatcher.
        """
        result = result or self._sizes.hidden
        operands = self._sizes.cut(width) + self._gathered_operand(result, experts)
        parts = self._operand_parts(experts)
        is_cast = not self._fuses_experts or experts is None, True
        product = self._product(
            width / self._share(experts),
            result,
            operands,
            copies,
            experts,
            is_biased,
            parts=(1, parts),
            is_cast=is_cast,
        )
        if experts is not None:
            return product + self._dispatched(copies * self._sizes.routed(result))
        size = copies * self._sizes.whole(result)
        summing, gathering = self._gathering(size), self._gathering(size, is_operand=True)
        if not self._is_cut:
            return product + Part(forward_seconds=2 * summing) + self._lent(product, 2 * summing)
        return (
            product
            + self._lent(product, summing)
            + Part(
                forward_seconds=self._kernels.exposed(summing, product.forward_seconds),
                input_gradient_seconds=self._kernels.exposed(gathering, product.input_gradient_seconds),
            )
            + self._gathered_again(size, is_operand=True)
        )

    def alone(self, read: int, result: int, is_biased: bool | None = None) -> Part:
        """Return the product from a width to another whose weight every tensor-parallel rank has whole.

        Each rank multiplies its own tokens.
        """
        operands = self._sizes.spread(read + result)
        return self._product(read, result, operands, 1 / self._sequence_ranks, is_biased=is_biased)

    def _share(self, experts: int | None) -> int:
        """Return the ranks that have a part of each weight."""
        return self._sizes.share if experts is None else self._sizes.expert_share

    def _dispatched(self, size: float) -> Part:
        """Return the collectives of ``size`` bytes in which a dispatcher gathers tokens, or scatters sums.

        They are of the ranks that share experts' weights (megatron.core.transformer.moe.token_dispatcher).
        """
        seconds = self._kernels.gather_for_experts(size)
        return Part(forward_seconds=seconds, input_gradient_seconds=seconds)

    def _operand_parts(self, experts: int | None) -> int:
        """Return the ranks that gather an operand and each cast their part of it."""
        return self._sizes.share if self._is_cut and experts is None else 1

    def _gathered_operand(self, width: float, experts: int | None) -> float:
        """Return the bytes that wait for W of an operand of ``width`` that tensor-parallel ranks gather."""
        if experts is not None:
            return self._sizes.routed(width)
        return (self._sizes.whole if self.waits_gathered else self._sizes.spread)(width)

    def _gathered_again(self, size: float, is_operand: bool) -> Part:
        """Return the costs of gathering ``size`` bytes of an operand again for W.

        Gathers run with the two products before, so that a long one hides the short ones after it:
        they cost the time by which they are longer than all products, and the first one, which runs alone.
        """
        if self.waits_gathered or self._sizes.share < 2:
            return Part()
        seconds = self._gathering(size, is_operand)
        self.largest_gathered = max(self.largest_gathered, size * (self._sizes.waiting if is_operand else 1))
        return Part(gathering=seconds, first_gathering=seconds)

    def _lent(self, product: Part, message: float) -> Part:
        """Return the W seconds of a row-parallel ``product`` that hide a column-parallel ``message`` of an I.

        Every row-parallel product comes after a column-parallel one of its layer, whose message is as large.
        """
        if not message or not (self._is_cut or self._overlaps_reduce):
            return Part()
        seconds = product.weight_gradient_seconds
        return Part(lent_seconds=seconds, hidden_beside=min(message, seconds))

    def _in_column(self, product: Part, size: float, is_operand: bool, is_normed: bool = False) -> Part:
        """Return ``product`` with the collectives of its input and of its input's gradient.

        For W a whole backward gathers the input once more in I.  An I leaves that to W where it can: local
        layers do, and Transformer Engine's layers with a norm whose operands are not quantized.
        """
        summing, gathering = self._gathering(size), self._gathering(size, is_operand)
        summing *= 1 if self._is_cut else 2
        hidden = min(summing, product.weight_gradient_seconds)
        if not self._is_cut:
            hidden = hidden if self._overlaps_reduce else 0.0
            return product + Part(input_gradient_seconds=summing, overlapped_in_whole=hidden)
        again = max(0.0, gathering - product.input_gradient_seconds)
        left_to_w = again if self._is_local or (is_normed and not self._is_fp8) else 0.0
        return (
            product
            + Part(
                forward_seconds=self._kernels.exposed(gathering, product.forward_seconds),
                input_gradient_seconds=again - left_to_w + summing,
                overlapped_in_whole=hidden - left_to_w,
            )
            + self._gathered_again(size, is_operand)
        )

    def _gathering(self, size: float, is_operand: bool = False) -> float:
        """Return the seconds to gather an activation of ``size`` bytes, or to scatter its sums.

        The operand of an FP8 product is gathered in FP8.
        """
        if self._sizes.share < 2:
            return 0.0
        return self._kernels.gather(size * (self._sizes.waiting if is_operand else 1))

    def _product(
        self,
        read: float,
        result: float,
        operands: float,
        copies: float = 1,
        experts: int | None = None,
        is_biased: bool | None = None,
        is_output: bool = False,
        parts: tuple[int, int] = (1, 1),
        is_normed: bool = False,
        is_cast: tuple[bool, bool] = (True, True),
    ) -> Part:
        """Return the product with a rank's weight of ``read`` times ``result``.

        ``operands`` are the bytes of its input and its output's gradient, for each of the ``copies``;
        ``is_cast`` is which of both a kernel casts, and ``parts`` are the ranks that each cast their
        part of it.  The activations that it keeps between F and I are counted with the layers around it.
        """
        sizes, kernels = self._sizes, self._kernels
        is_grouped = self._is_grouped and experts is not None
        # The ranks that share an expert gather their tokens; all tensor-parallel ranks have a part of them.
        tokens = (
            copies * sizes.tokens * self._share(experts) / sizes.share if experts else copies * sizes.tokens
        )
        experts = experts or 1
        rows = tokens / experts
        groups = experts if is_grouped else 1
        seconds = (
            kernels.product(rows, result, read, is_output=is_output, groups=groups),
            kernels.product(rows, read, result, is_output=is_output, groups=groups),
            kernels.product(read, result, rows, adds=self._fuses, is_output=is_output, groups=groups),
        )
        launches = experts // groups
        # A gradient that its product does not add is read with the buffer, which is written.
        adding = 0.0 if self._fuses else kernels.copy((sizes.bytes + 2 * self._gradient) * read * result)
        waiting = max(1, copies) * operands * (1.0 if is_output else sizes.waiting)
        if is_grouped and not self._fuses:
            # Transformer Engine makes the weights' gradients in I, for W to fill (module/grouped_linear.py).
            waiting += experts * sizes.bytes * read * result
        # F casts the input, I the gradient of the output; W finds both.
        casts = kernels.cast(tokens * read, parts[0], is_normed), kernels.cast(tokens * result, parts[1])
        casts = (0.0, 0.0) if is_output else (casts[0] * is_cast[0], casts[1] * is_cast[1])
        has_bias = self._has_biases if is_biased is None else is_biased
        product = Part(
            weight_operations=2 * tokens * read * result,
            forward_seconds=launches * seconds[0] + casts[0],
            input_gradient_seconds=launches * seconds[1] + casts[1],
            weight_gradient_seconds=launches * seconds[2] + experts * adding,
            after_input_gradient=waiting,
            parameters=read * result + (result if has_bias else 0.0),
            fp8_parameters=read * result if self._is_fp8 and not is_output else 0.0,
        )
        if is_output:
            return product
        self.shapes.add((read, result))
        return product + matrix(self._memory, read, result)


def _keeps_gathered(job: Job, sizes: ActivationSizes) -> bool:
    """Whether W needs all of a gathered operand to have been kept; see ``ProductCosts``."""
    precision = job.precision
    if precision.transformer_impl == "local":
        return False
    scaled = _SCALED_TOGETHER.get("fp4" if precision.fp4 else precision.fp8_recipe, 1)
    parts = precision.uses_fp8 and sizes.tokens / job.parallel.sequence_ranks % scaled
    return bool(parts)


class LayerCosts:
    """The building blocks of layers in ``job``: sizes, products, norms.

    ``kernels`` estimate their seconds.
    """

    def __init__(self, job: Job, kernels: KernelSeconds | None = None) -> None:
        self.job = job
        self.kernels = kernels or KernelSeconds()
        self.sizes = ActivationSizes(job)
        self.products = ProductCosts(job, self.sizes, self.kernels)
        self.recomputed = job.memory.recomputed

    @property
    def recomputes_norms(self) -> bool:
        """Whether the outputs of norms that are kernels of their own are computed again."""
        return "layernorm" in self.recomputed

    def of(self, **values: Any) -> "LayerCosts":
        """Return the same of a job with other ``values``."""
        other = LayerCosts(self.job.changed(**values), self.kernels)
        other.products.shapes = self.products.shapes
        return other

    @property
    def hidden_bytes(self) -> float:
        """The bytes of one activation of the hidden size, which only sequence parallelism divides."""
        return self.sizes.hidden_bytes

    def other(self) -> Part:
        """Return the small costs that every stage has, even without layers, such as residual additions.

        Layers that are computed again keep the part of the mask that they were called with, all the same one.
        """
        is_again = self.job.memory.recomputes_layers or "core_attn" in self.recomputed
        operations = self.sizes.tokens * self.sizes.hidden
        seconds = self.kernels.addition(operations)
        return Part(
            weight_operations=operations,
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            weight_gradient_seconds=seconds,
            masks=float(is_again and self.job.precision.is_unfused),
        )

    def norm(self, is_recomputed: bool | None = None) -> Part:
        """Return a norm and the addition to the residual stream.

        The norm keeps its input, and the layer after it keeps the norm's output unless that is recomputed.
        By default "layernorm" decides, but nothing is recomputed where Transformer Engine computes the norm
        with the product after it.
        """
        if is_recomputed is None:
            is_recomputed = self.recomputes_norms and self.job.precision.transformer_impl == "local"
        saved_copies = 1 if is_recomputed else 1 + self.sizes.waiting
        # The norm reads and writes, the addition reads two and writes one; their backwards likewise.
        seconds = self.kernels.copy(5 * self.hidden_bytes)
        parameters = self.sizes.hidden * (1 if self.job.model.normalization == "RMSNorm" else 2)
        return Part(
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            after_forward=saved_copies * self.hidden_bytes,
            parameters=parameters,
        )

    def dropped(self) -> Part:
        """Return the dropout after embedding, attention or MLP, with a mask of a byte for each number.

        The addition after it writes the mask too.  Its backward reads gradient and mask, and writes.
        """
        if not self.job.model.hidden_dropout:
            return Part()
        mask = self.hidden_bytes / self.sizes.bytes
        return Part(
            forward_seconds=self.kernels.copy(mask),
            input_gradient_seconds=self.kernels.copy(mask + 2 * self.hidden_bytes),
            after_forward=mask,
        )
