"""Estimates the seconds that the kernels and the collectives of a layer take.

``KernelSeconds`` counts operations only and serves where ratios are enough, as for compiling a schedule.
``SystemKernelSeconds`` is for a machine: a product runs at the rate of its shape, unless reading and writing
its operands takes longer; it also counts copies, and collectives of the tensor-, context- and expert-parallel
groups.
"""

from dataclasses import replace

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job

_SECONDS_PER_OPERATION = 1e-15
"""Where only ratios matter any constant will do; this one is a petaflop a second."""

_FUSED_RATE = 0.7
"""The rate of fused attention as a fraction of a plain product's.

FlashAttention-2 (arXiv 2307.08691, figures 5 and 6), causal, heads of 128, sequences of 2k and more: some
170 to 200 TFLOP/s on an A100, where plain products reach 268."""

_FUSED_BACKWARD = 2.5
"""The products in the backward of fused attention for each one of the forward (same source, section 4.1).

They run as fast as those of the forward: 518 and 529 TFLOP/s over 8,192 tokens on an H100 (arXiv 2407.08608,
figures 5 and 6, cuDNN)."""

_ATTENTION_TILE = 128
"""The queries that a processor works on at a time in fused attention (arXiv 2307.08691, section 3.3)."""

_DELTA_RATE = 0.12
"""The rate of a gated delta rule's forward as a fraction of a plain product's.

With heads of 128 a token of a head takes 2.0 to 3.2 ns on an H100, the less the more heads there are, for
the 184,000 operations that are counted here, where plain products reach 744 TFLOP/s
(ai-dynamo/aiconfigurator, commit 095f58a51, linear_attention/trtllm 1.3.0rc20)."""

_DELTA_BACKWARD = 3.0
"""The backward of a delta rule for each forward: the forward again, and two of the kind for its gradients.
This is assumed; no measurement of a backward was found."""

_SCANNED_RATE = 0.2
"""The part of device memory's rate at which the kernels of Mamba-2's scan read and write.

That scan, with states of 64, takes as long as FlashAttention-2 over 2,048 tokens on an A100
(arXiv 2405.21060, figure 10), which is 0.18; TensorRT-LLM's forward reaches 0.27 on a B200
(ai-dynamo/aiconfigurator, commit 095f58a51, linear_attention/trtllm/1.3.0rc15)."""

_SCANNED_BACKWARD = 3.0
"""The backward of a scan for each forward: the forward again, and two of the kind for its gradients.  This is
assumed; no measurement of a backward was found."""


class KernelSeconds:
    """Seconds in proportion to operations; everything else takes none."""

    def product(
        self, m: float, n: float, k: float, adds: bool = False, is_output: bool = False, groups: float = 1
    ) -> float:
        """Return the seconds of ``groups`` products of m x k with k x n, which add in fp32 if ``adds``.

        ``is_output`` is for the output layer, which Megatron never computes in FP8.
        """
        return 2 * groups * m * n * k * _SECONDS_PER_OPERATION

    def attention(
        self,
        operations: float,
        scores: float,
        is_fused: bool,
        length: float,
        width: float = 128,
        seen: float = 0.5,
        is_wide: bool = False,
    ) -> tuple[float, float]:
        """Return the seconds of attention itself, without its projections: of its forward and backward.

        The forward has so many ``operations`` over sequences of ``length`` with heads of ``width``, in fp32
        if it ``is_wide``, and its probabilities are ``scores`` bytes.  Masks leave a share of the operations
        to be ``seen``.
        """
        forward = 2 * seen * operations * _SECONDS_PER_OPERATION
        return forward, 2 * forward

    def delta_rule(self, operations: float) -> tuple[float, float]:
        """Return the seconds of a delta rule, whose forward has so many ``operations``, and its backward."""
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def scan(self, operations: float, size: float) -> tuple[float, float]:
        """Return the seconds of a scan over a sequence by chunks: of its forward and its backward.

        The forward has so many ``operations``, and its kernels read and write ``size`` bytes.
        """
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def cast(self, numbers: float, ranks: int = 1) -> float:
        """Return the seconds to make so many ``numbers`` the operands of FP8 products.

        Each of ``ranks`` casts a part of them, before they are gathered.
        """
        return 0.0

    def addition(self, numbers: float) -> float:
        """Return the seconds to add so many ``numbers`` to as many."""
        return numbers * _SECONDS_PER_OPERATION

    def copy(self, size: float) -> float:
        """Return the seconds of reading and writing ``size`` bytes of device memory in all."""
        return 0.0

    def gather(self, size: float) -> float:
        """Return the seconds to gather ``size`` bytes in a tensor-parallel group, or to reduce-scatter."""
        return 0.0

    def behind(self, collective: float, product: float) -> float:
        """Return what of a tensor-parallel ``collective`` its ``product`` does not hide, in seconds."""
        return collective

    def shuffle(self, size: float) -> float:
        """Return the seconds of sending ``size`` bytes to the experts, or back."""
        return 0.0

    def exchange(self, size: float) -> float:
        """Return the seconds in which context-parallel ranks give ``size`` bytes of tokens for heads."""
        return 0.0

    def ring(self, seconds: float, size: float, results: float) -> float:
        """Return the seconds of attention, which takes ``seconds``, among context-parallel ranks.

        ``size`` bytes of keys and values go around, and ``results`` numbers of each part are added up.
        """
        return seconds

    def launched(self, part: Part, kernels: float) -> Part:
        """Return ``part`` with the least seconds in which a host starts the ``kernels`` of its forward."""
        return part


class SystemKernelSeconds(KernelSeconds):
    """Seconds on ``system`` for the parallel sizes and the number format of ``job``.

    Megatron's ranks count tensor, context, data and pipeline parallelism from the inside outwards, so
    tensor-parallel neighbours are 1 apart and context-parallel ones a tensor-parallel size.
    """

    def __init__(self, system: System, job: Job) -> None:
        self._system = system
        precision, parallel = job.precision, job.parallel
        self._half = "bf16" if precision.is_half else "fp32"
        self._dtype = "fp8" if precision.fp8 and precision.is_half else self._half
        self._bytes = precision.weight_size
        self._tensor = parallel.tensor_model_parallel_size
        self._overlaps = parallel.tp_comm_overlap and parallel.sequence_parallel
        self._context = parallel.context_parallel_size
        self._expert = parallel.expert_model_parallel_size
        self._expert_tensor = parallel.expert_tensor
        self._drops = job.model.attention_dropout > 0
        self._sends_once = parallel.moe_token_dispatcher_type == "flex"
        self._chosen = job.model.moe_router_topk

    def product(
        self, m: float, n: float, k: float, adds: bool = False, is_output: bool = False, groups: float = 1
    ) -> float:
        """Return the seconds at the shape's rate, or those of reading and writing the operands if more."""
        dtype = self._half if is_output else self._dtype
        seconds = 2 * groups * m * n * k / self._system.rate(dtype, m, n, k, groups)
        read = (1 if dtype == "fp8" else self._bytes) * (m * k + k * n)
        written = (8 if adds else self._bytes) * m * n
        exposed = self._system.exposed_sums * written if adds else 0.0
        behind = groups * exposed / self._system.copy_bytes_per_second
        return max(seconds, self.copy(groups * (read + written - exposed))) + behind

    def attention(
        self,
        operations: float,
        scores: float,
        is_fused: bool,
        length: float,
        width: float = 128,
        seen: float = 0.5,
        is_wide: bool = False,
    ) -> tuple[float, float]:
        """Return the seconds at the measured rate of fused attention, else at a share of a product's.

        Fused kernels skip what masks hide; unfused attention computes it and passes over all scores.
        """
        rate = self._system.rate("fp32" if is_wide else self._half, *(3 * [operations ** (1 / 3)]))
        if is_fused:
            tiles = operations / (4 * length * width * _ATTENTION_TILE)
            rate = self._system.attention_rate(width, seen * length, tiles) or _FUSED_RATE * rate
            return seen * operations / rate, _FUSED_BACKWARD * seen * operations / rate
        # Scores are written, put through softmax and read.  Their gradient is written, put through softmax
        # beside them, and read twice, and they once more.  Dropout reads, writes, and has a mask of a byte.
        dropping = 2.5 if self._drops else 0.0
        forward, backward = (4 + dropping) * scores, (7 + dropping) * scores
        return operations / rate + self.copy(forward), 2 * operations / rate + self.copy(backward)

    def delta_rule(self, operations: float) -> tuple[float, float]:
        """Return the seconds at a share of a product's rate."""
        forward = operations / (_DELTA_RATE * self._system.rate(self._half, *(3 * [operations ** (1 / 3)])))
        return forward, _DELTA_BACKWARD * forward

    def scan(self, operations: float, size: float) -> tuple[float, float]:
        """Return the seconds at a share of the rate of device memory, which bounds a scan's small kernels."""
        forward = size / (_SCANNED_RATE * self._system.copy_bytes_per_second)
        return forward, _SCANNED_BACKWARD * forward

    def cast(self, numbers: float, ranks: int = 1) -> float:
        """Return the seconds to read them, and to write them by rows and by columns, a byte for each.

        Numbers that were gathered by rows are read again to write them by columns.
        """
        if self._dtype != "fp8":
            return 0.0
        if ranks == 1:
            return self.copy((self._bytes + 2) * numbers)
        return self.copy((self._bytes + 1) * numbers / ranks + 2 * numbers)

    def addition(self, numbers: float) -> float:
        """Return the seconds to read both and to write the sums."""
        return self.copy(3 * self._bytes * numbers)

    def copy(self, size: float) -> float:
        """Return the seconds at the rate of device memory."""
        return size / (self._system.copy_bytes_per_second * self._system.sustained.get("copy", 1.0))

    def gather(self, size: float) -> float:
        """Return the seconds of the collective, with tensor-parallel ranks next to each other."""
        return self._system.gather_seconds(size, self._tensor)

    def behind(self, collective: float, product: float) -> float:
        """Return the whole collective, or under --tp-comm-overlap one rank's part and what is longer.

        There the product runs in as many parts as ranks, and one part is never hidden.
        """
        if not self._overlaps:
            return collective
        return max(collective - product, 0.0) + min(collective, product) / self._tensor

    def shuffle(self, size: float) -> float:
        """Return the seconds of the all-to-all, with ranks an expert's tensor-parallel size apart.

        A dispatcher that sends a token once to each node takes less of the network.
        """
        ranks, stride = self._expert, self._expert_tensor
        if self._sends_once:
            nodes = ranks * stride / self._system.gpus_per_node
            size *= _copies_sent(self._chosen, nodes) / self._chosen
        return self._system.all_to_all_seconds(size, ranks, stride)

    def exchange(self, size: float) -> float:
        """Return the seconds of the all-to-all, with ranks a tensor-parallel size apart."""
        return self._system.all_to_all_seconds(size, self._context, self._tensor)

    def ring(self, seconds: float, size: float, results: float) -> float:
        """Return the seconds of a part for every rank, of which all but the first wait for a message.

        Parts are equally long, as Megatron deals out the causal mask (arXiv 2310.01889; Megatron's
        cp_comm_type p2p).  A message travels during the part before.
        """
        others, part = self._context - 1, seconds / self._context
        if not others:
            return seconds
        message = self._system.link(self._context, self._tensor).seconds(size)
        return part + others * (max(part, message) + self.addition(results))

    def launched(self, part: Part, kernels: float) -> Part:
        """Return ``part``, none of whose actions is shorter than its launches.

        A backward has two kernels for one of the forward: those of I, and fewer of W.
        """
        least = kernels * self._system.kernel_seconds
        return replace(
            part,
            forward_seconds=max(part.forward_seconds, least),
            input_gradient_seconds=max(part.input_gradient_seconds, 1.5 * least),
            weight_gradient_seconds=max(part.weight_gradient_seconds, 0.5 * least),
        )


def _copies_sent(chosen: int, nodes: float) -> float:
    """Return the nodes that a token's ``chosen`` experts are on, where they are spread evenly."""
    if nodes <= 1:
        return float(chosen)
    return nodes * (1 - (1 - 1 / nodes) ** chosen)
