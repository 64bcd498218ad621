"""The accepted values of the fields in a system's description."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from megatron_pp_ext.json_input import STRICT, above, at_least, of_length, one_of, printable

DTYPES = ("bf16", "fp32", "fp8", "fp8_block", "fp4")
"""The number formats of ``matrix_rates``; fp16 counts as bf16, FP8 has scales of tensors or of blocks, and
FP4 is NVFP4."""

type Text = Annotated[str, printable()]
type Dtype = Annotated[str, one_of(*DTYPES)]
type Sustained = Annotated[str, one_of("clock", "copy", "cast", "network", "overlap", "group", "scale")]
type Positive = Annotated[float, above(0)]
type NotNegative = Annotated[float, at_least(0)]
type Count = Annotated[int, at_least(1)]
type CountOrNone = Annotated[int, at_least(0)]
type MatrixRate = Annotated[Sequence[Positive], of_length(4)]
type AttentionRate = Annotated[Sequence[Positive], of_length(3)]
type Collective = Annotated[Sequence[Positive], of_length(3)]


@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's share of a link in one direction: bytes a second, and the seconds of an empty message."""

    __pydantic_config__: ClassVar = STRICT

    bytes_per_second: Positive
    latency_seconds: NotNegative = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency_seconds + size / self.bytes_per_second
