"""How long the pieces of a layer take.

``Clock`` knows operations alone and serves where only ratios matter: schedules are compiled from those.
``SystemClock`` knows a machine: the rate of a product by its shape, unless reading and writing it takes
longer; what moves through memory; collectives of the tensor-, context- and expert-parallel groups.
"""

from argparse import Namespace

from megatron_pp_ext.planner.system import System

_SECONDS_PER_OPERATION = 1e-15
"""Any constant does where ratios matter.  This one is a petaflop a second."""

_FUSED_RATE = 0.7
"""What fused attention reaches of a plain product's rate.

FlashAttention-2 (arXiv 2307.08691, figures 5 and 6), causal, heads of 128, sequences of 2k and more: some
170 to 200 TFLOP/s on an A100, where plain products reach 268."""

_FUSED_BACKWARD = 2.5
"""Products in the backward of fused attention for every one of the forward (same source, section 4.1)."""


class Clock:
    """Seconds in proportion to operations; everything else is free."""

    def product(self, m: float, n: float, k: float, times: float = 1.0, adds: bool = False) -> float:
        """``times`` products of m x k with k x n; ``adds``: to fp32 numbers in memory."""
        return times * 2 * m * n * k * _SECONDS_PER_OPERATION

    def attention(self, operations: float, scores: float, is_fused: bool) -> tuple[float, float]:
        """Forward and backward of attention proper: ``operations``, and ``scores`` bytes of probabilities."""
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def copy(self, size: float) -> float:
        """Reading and writing ``size`` bytes of device memory in all."""
        return 0.0

    def gather(self, size: float) -> float:
        """Gathering ``size`` bytes over the tensor-parallel group, or reducing and scattering them."""
        return 0.0

    def shuffle(self, size: float) -> float:
        """Sending ``size`` bytes to the experts, or back."""
        return 0.0

    def exchange(self, size: float) -> float:
        """Sending ``size`` bytes of keys and values once around the context-parallel group."""
        return 0.0


class SystemClock(Clock):
    """The clock of ``system`` for the ranks and number format that ``args`` ask for.

    Megatron's ranks count tensor, context, data and pipeline parallelism from the inside outwards, so
    tensor-parallel neighbours are 1 apart and context-parallel ones a tensor-parallel size.
    """

    def __init__(self, system: System, args: Namespace) -> None:
        self._system = system
        is_half = args.bf16 or args.fp16
        self._dtype = ("fp8" if args.fp8 else "bf16") if is_half else "fp32"
        self._attention_dtype = "bf16" if is_half else "fp32"
        self._bytes = 2 if is_half else 4
        self._tensor = args.tensor_model_parallel_size
        self._context = args.context_parallel_size
        self._expert = args.expert_model_parallel_size
        self._expert_tensor = args.expert_tensor_parallel_size or self._tensor

    def product(self, m: float, n: float, k: float, times: float = 1.0, adds: bool = False) -> float:
        """By shape, or as long as its operands take through memory."""
        rate = self._system.rate(self._dtype, m, n, k)
        written = m * n * (8 if adds else self._bytes)
        through = self.copy(self._bytes * (m * k + k * n) + written)
        return times * max(2 * m * n * k / rate, through)

    def attention(self, operations: float, scores: float, is_fused: bool) -> tuple[float, float]:
        """At the rate of a plain product of as many operations.

        Fused kernels leave out what the causal mask hides; single operations compute it and pass over all
        scores.
        """
        rate = self._system.rate(self._attention_dtype, *(3 * [operations ** (1 / 3)]))
        if is_fused:
            forward = operations / 2 / (_FUSED_RATE * rate)
            return forward, _FUSED_BACKWARD * forward
        # Scores are written, scaled and masked, put through softmax, dropped, and read: six passes.
        return operations / rate + self.copy(6 * scores), 2 * operations / rate + self.copy(9 * scores)

    def copy(self, size: float) -> float:
        """At the rate of device memory."""
        return size / self._system.copy_bytes_per_second

    def gather(self, size: float) -> float:
        """Over tensor-parallel neighbours."""
        return self._system.gather_seconds(size, self._tensor)

    def shuffle(self, size: float) -> float:
        """Over expert-parallel ranks, an expert's tensor-parallel size apart."""
        return self._system.all_to_all_seconds(size, self._expert, self._expert_tensor)

    def exchange(self, size: float) -> float:
        """A message to each next rank, one less than there are."""
        if self._context < 2:
            return 0.0
        link = self._system.link(self._context, self._tensor)
        return (self._context - 1) * link.seconds(size)
