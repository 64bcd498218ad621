"""Estimates the seconds that the kernels and the collectives of a layer take, in proportion to operations.

That serves where ratios are enough, as for compiling a schedule; ``system_kernels`` is for a machine.
"""

from typing import NamedTuple

from megatron_pp_ext.costs.part import Part

_SECONDS_PER_OPERATION = 1e-15
"""Where only ratios matter any constant will do; this one is a petaflop a second."""


class AttentionWork(NamedTuple):
    """The operations of attention, without its projections."""

    operations: float
    """The operations of the forward where no mask hides any."""
    scores: float
    """The bytes of the forward's probabilities."""
    is_fused: bool
    length: float
    """The tokens of a sequence."""
    width: float = 128
    """The numbers of a head."""
    seen: float = 0.5
    """The share of the operations that masks leave."""
    is_wide: bool = False
    """Whether it is in fp32."""


class KernelSeconds:
    """Seconds in proportion to operations; everything else takes none."""

    def product(
        self, m: float, n: float, k: float, adds: bool = False, is_output: bool = False, groups: float = 1
    ) -> float:
        """Return the seconds of ``groups`` products of m x k with k x n, which add in fp32 if ``adds``.

        ``is_output`` is for the output layer, which Megatron never computes in FP8.
        """
        return 2 * groups * m * n * k * _SECONDS_PER_OPERATION

    def attention(self, work: AttentionWork) -> tuple[float, float]:
        """Return the seconds of attention itself, without its projections: of its forward and backward."""
        forward = 2 * work.seen * work.operations * _SECONDS_PER_OPERATION
        return forward, 2 * forward

    def delta_rule(self, operations: float) -> tuple[float, float]:
        """Return the seconds of a delta rule, whose forward has so many ``operations``, and its backward."""
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def scan(self, operations: float, size: float) -> tuple[float, float]:
        """Return the seconds of a scan over a sequence by chunks: of its forward and its backward.

        The forward has so many ``operations``, and its kernels read and write ``size`` bytes.
        """
        return operations * _SECONDS_PER_OPERATION, 2 * operations * _SECONDS_PER_OPERATION

    def cast(self, numbers: float, ranks: int = 1, is_normed: bool = False) -> float:
        """Return the seconds to make so many ``numbers`` the operands of FP8 products.

        Each of ``ranks`` casts a part of them, before they are gathered.  Where a norm made them, it
        may write them cast.
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

    def gather_for_experts(self, size: float) -> float:
        """Return the seconds to gather ``size`` bytes among the ranks that share an expert."""
        return 0.0

    def exposed(self, collective: float, product: float) -> float:
        """Return the seconds of a tensor-parallel ``collective`` that its ``product`` does not hide."""
        return collective

    def shuffle(self, size: float) -> float:
        """Return the seconds of sending ``size`` bytes to the experts, or back."""
        return 0.0

    def reached(self, ranks: int) -> float:
        """Return to how many of ``ranks`` that share the experts a token goes."""
        return float(ranks)

    @property
    def left_beside_exchange(self) -> float:
        """The part of the processors that an exchange between experts leaves to others."""
        return 1.0

    def exchange(self, size: float) -> float:
        """Return the seconds in which context-parallel ranks give ``size`` bytes of tokens for heads."""
        return 0.0

    def ring(self, seconds: float, size: float, results: float) -> float:
        """Return the seconds of attention, which takes ``seconds``, among context-parallel ranks.

        ``size`` bytes of keys and values go around, and ``results`` numbers of each part are added up.
        """
        return seconds

    def stream(self, size: float) -> float:
        """Return the seconds of reading and writing ``size`` bytes in all in a few large copies."""
        return 0.0

    def to_host(self, size: float) -> float:
        """Return the seconds in which ``size`` bytes go to the host, or come back."""
        return 0.0

    def launched(self, part: Part, kernels: float, has_routed: bool = False) -> Part:
        """Return ``part`` with the least seconds in which a host starts the ``kernels`` of its forward.

        With ``has_routed`` the shapes of some depend on where tokens go.
        """
        return part
