"""The costs of a product with a weight, and of the tensor-parallel collectives before and behind it."""

from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job


class ActivationSizes:
    """The sizes of the activations of one microbatch on a tensor-parallel rank.

    A number has ``bytes``, and ``waiting`` times as many where it is kept as the operand of a product.
    """

    def __init__(self, job: Job) -> None:
        parallel = job.parallel
        self.tokens = job.model.seq_length * job.batch.micro_batch_size / parallel.context_parallel_size
        self.bytes = job.precision.weight_size
        self.waiting = 1 / self.bytes if job.precision.uses_fp8 else 1.0
        self.share = parallel.tensor_model_parallel_size
        self.hidden = job.model.hidden_size
        self.whole = self.tokens * self.hidden * self.bytes
        self.hidden_bytes = self.whole / parallel.sequence_ranks

    def cut(self, width: float) -> float:
        """Return the bytes of an activation of ``width`` that tensor parallelism divides."""
        return self.tokens * width * self.bytes / self.share


class ProductCosts:
    """Products of the hidden size with other widths, for ``job``.

    ``copies`` stand for as many times the tokens, which ``experts`` of the rank share.
    """

    def __init__(self, job: Job, sizes: ActivationSizes, kernels: KernelSeconds) -> None:
        self._sizes, self._kernels = sizes, kernels
        self._is_cut, self._has_biases = job.parallel.sequence_parallel, job.model.add_bias_linear
        self._overlaps_reduce = job.parallel.async_tensor_model_parallel_allreduce
        self._is_fp8, self._gradient = job.precision.uses_fp8, job.precision.gradient_size
        self._fuses = job.precision.gradient_accumulation_fusion
        self._is_grouped = job.precision.moe_grouped_gemm

    def column(self, width: int, copies: int = 1, experts: int = 1) -> Part:
        """Return the product from the hidden size to ``width``, which tensor-parallel ranks share.

        Under sequence parallelism the input is gathered, once more behind I's product for W, and I's result
        is scattered; without it, I's results are summed.  Either runs behind W where the backward is whole.
        """
        return self._in_column(self._product(width, copies, experts), copies, is_operand=copies == 1)

    def output(self, vocabulary: int) -> Part:
        """Return the output layer, which has no bias and is not computed in FP8."""
        return self._in_column(self._product(vocabulary, 1, 1, is_output=True), 1, is_operand=False)

    def row(self, width: int, copies: int = 1, experts: int = 1) -> Part:
        """Return the product from a share of ``width`` to the hidden size, with the sum of its results."""
        product = self._product(width, copies, experts, is_row=True)
        summing, gathering = self._gathering(copies), self._gathering(copies, is_operand=copies == 1)
        if not self._is_cut:
            return product + Part(forward_seconds=2 * summing)
        return product + Part(
            forward_seconds=self._kernels.behind(summing, product.forward_seconds),
            input_gradient_seconds=self._kernels.behind(gathering, product.input_gradient_seconds),
        )

    def _in_column(self, product: Part, copies: int, is_operand: bool) -> Part:
        summing, gathering = self._gathering(copies), self._gathering(copies, is_operand)
        summing *= 1 if self._is_cut else 2
        hidden = min(summing, product.weight_gradient_seconds)
        if not self._is_cut:
            hidden = hidden if self._overlaps_reduce else 0.0
            return product + Part(input_gradient_seconds=summing, overlapped_in_whole=hidden)
        again = max(0.0, gathering - product.input_gradient_seconds)
        return product + Part(
            forward_seconds=self._kernels.behind(gathering, product.forward_seconds),
            input_gradient_seconds=again + summing,
            overlapped_in_whole=hidden,
        )

    def _gathering(self, copies: int, is_operand: bool = False) -> float:
        """Return the seconds to gather an activation, or to scatter its sums.

        The operand of an FP8 product is gathered in FP8; what a dispatcher gathers for experts is not.
        """
        if self._sizes.share < 2:
            return 0.0
        return self._kernels.gather(copies * self._sizes.whole * (self._sizes.waiting if is_operand else 1))

    def _product(
        self, width: int, copies: int, experts: int, is_row: bool = False, is_output: bool = False
    ) -> Part:
        """Return the product with a weight of hidden size times ``width``, in either direction.

        The activations that it keeps between F and I are counted with the layers around it.
        """
        sizes, kernels = self._sizes, self._kernels
        tokens, inner, hidden = copies * sizes.tokens, width / sizes.share, sizes.hidden
        read, made = (inner, hidden) if is_row else (hidden, inner)
        each = tokens / experts
        groups = experts if self._is_grouped else 1
        seconds = (
            kernels.product(each, made, read, is_output=is_output, groups=groups),
            kernels.product(each, read, made, is_output=is_output, groups=groups),
            kernels.product(read, made, each, adds=self._fuses, is_output=is_output, groups=groups),
        )
        launches = experts // groups
        # A gradient that its product does not add is read with the buffer, which is written.
        adding = 0.0 if self._fuses else kernels.copy((sizes.bytes + 2 * self._gradient) * read * made)
        # F casts the input, I the gradient of the output; W finds both.
        # Ranks that gather the operand each cast their part of it.
        parts = sizes.share if self._is_cut and copies == 1 else 1
        casts = (
            kernels.cast(tokens * read, 1 if is_row else parts),
            kernels.cast(tokens * made, parts if is_row else 1),
        )
        if is_output:
            casts = (0.0, 0.0)
        waiting = 1.0 if is_output else sizes.waiting
        bias = 0.0 if is_output or not self._has_biases else hidden if is_row else inner
        kept = sizes.whole if is_row else sizes.hidden_bytes
        return Part(
            weight_operations=2 * tokens * hidden * inner,
            forward_seconds=launches * seconds[0] + casts[0],
            input_gradient_seconds=launches * seconds[1] + casts[1],
            weight_gradient_seconds=launches * seconds[2] + experts * adding,
            after_input_gradient=copies * (kept + sizes.cut(width)) * waiting,
            parameters=hidden * inner + bias,
            fp8_parameters=hidden * inner if self._is_fp8 and not is_output else 0.0,
        )
