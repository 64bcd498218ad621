"""Estimates the seconds that the kernels and the collectives of a layer take.

``KernelSeconds`` counts operations only and serves where ratios are enough, as for compiling a schedule.
``SystemKernelSeconds`` is for a machine: a product runs at the rate of its shape, unless reading and writing
its operands takes longer; it also counts copies, and collectives of the tensor-, context- and expert-parallel
groups.
"""

from argparse import Namespace

from megatron_pp_ext.planner.step.model_state import weight_size
from megatron_pp_ext.planner.system import System

_SECONDS_PER_OPERATION = 1e-15
"""Where only ratios matter any constant will do; this one is a petaflop a second."""

_FUSED_RATE = 0.7
"""The rate of fused attention as a fraction of a plain product's.

FlashAttention-2 (arXiv 2307.08691, figures 5 and 6), causal, heads of 128, sequences of 2k and more: some
170 to 200 TFLOP/s on an A100, where plain products reach 268."""

_FUSED_BACKWARD = 2.5
"""The products in the backward of fused attention for each one of the forward (same source, section 4.1)."""


class KernelSeconds:
    """Seconds in proportion to operations; everything else takes none."""

    def product(self, m: float, n: float, k: float, adds: bool = False) -> float:
        """Return the seconds of a product of m x k with k x n, which ``adds`` to fp32 numbers if true."""
        return 2 * m * n * k * _SECONDS_PER_OPERATION

    def attention(self, operations: float, scores: float, is_fused: bool) -> tuple[float, float]:
        """Return the seconds of attention itself, without its projections: of its forward and its backward.

        The forward has so many ``operations``, and its probabilities are ``scores`` bytes.
        """
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def copy(self, size: float) -> float:
        """Return the seconds of reading and writing ``size`` bytes of device memory in all."""
        return 0.0

    def gather(self, size: float) -> float:
        """Return the seconds to gather ``size`` bytes in a tensor-parallel group, or to reduce-scatter."""
        return 0.0

    def shuffle(self, size: float) -> float:
        """Return the seconds of sending ``size`` bytes to the experts, or back."""
        return 0.0

    def exchange(self, size: float) -> float:
        """Return the seconds of sending ``size`` bytes of keys and values around context-parallel ranks."""
        return 0.0


class SystemKernelSeconds(KernelSeconds):
    """Seconds on ``system`` for the parallel sizes and the number format in ``args``.

    Megatron's ranks count tensor, context, data and pipeline parallelism from the inside outwards, so
    tensor-parallel neighbours are 1 apart and context-parallel ones a tensor-parallel size.
    """

    def __init__(self, system: System, args: Namespace) -> None:
        self._system = system
        is_half = args.bf16 or args.fp16
        self._dtype = ("fp8" if args.fp8 else "bf16") if is_half else "fp32"
        self._attention_dtype = "bf16" if is_half else "fp32"
        self._bytes = weight_size(args)
        self._tensor = args.tensor_model_parallel_size
        self._context = args.context_parallel_size
        self._expert = args.expert_model_parallel_size
        self._expert_tensor = args.expert_tensor_parallel_size or self._tensor

    def product(self, m: float, n: float, k: float, adds: bool = False) -> float:
        """Return the seconds at the shape's rate, or those of reading and writing the operands if more."""
        rate = self._system.rate(self._dtype, m, n, k)
        written = m * n * (8 if adds else self._bytes)
        through_memory = self.copy(self._bytes * (m * k + k * n) + written)
        return max(2 * m * n * k / rate, through_memory)

    def attention(self, operations: float, scores: float, is_fused: bool) -> tuple[float, float]:
        """Return the seconds at the rate of a plain product of as many operations.

        Fused kernels skip what the causal mask hides; unfused attention computes it and passes over all
        scores.
        """
        rate = self._system.rate(self._attention_dtype, *(3 * [operations ** (1 / 3)]))
        if is_fused:
            forward = operations / 2 / (_FUSED_RATE * rate)
            return forward, _FUSED_BACKWARD * forward
        # Scores are written, scaled and masked, put through softmax, dropped, and read: six passes.
        return operations / rate + self.copy(6 * scores), 2 * operations / rate + self.copy(9 * scores)

    def copy(self, size: float) -> float:
        """Return the seconds at the rate of device memory."""
        return size / self._system.copy_bytes_per_second

    def gather(self, size: float) -> float:
        """Return the seconds of the collective, with tensor-parallel ranks next to each other."""
        return self._system.gather_seconds(size, self._tensor)

    def shuffle(self, size: float) -> float:
        """Return the seconds of the all-to-all, with ranks an expert's tensor-parallel size apart."""
        return self._system.all_to_all_seconds(size, self._expert, self._expert_tensor)

    def exchange(self, size: float) -> float:
        """Return the seconds of one message to the next rank for every other rank of the group."""
        if self._context < 2:
            return 0.0
        link = self._system.link(self._context, self._tensor)
        return (self._context - 1) * link.seconds(size)
