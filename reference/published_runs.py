"""Published measurements of whole training runs.  What a source leaves open is assumed and noted."""

from typing import NamedTuple


class MegatronRun(NamedTuple):
    """A row of arXiv 2205.05198, table 5: seconds of a step with full and with selective recomputation."""

    name: str
    layers: int
    hidden: int
    heads: int
    pipeline: int
    chunks: int
    batch: int
    full: float
    selective: float
    microbatch: int = 1


MEGATRON = (
    MegatronRun("22B", 48, 6144, 64, 1, 1, 4, 1.42, 1.10, 4),
    MegatronRun("175B", 96, 12288, 96, 8, 3, 64, 18.13, 13.75),
    MegatronRun("530B", 105, 20480, 128, 35, 3, 280, 49.05, 37.83),
    MegatronRun("1T", 128, 25600, 160, 64, 1, 512, 94.42, 71.49),
)
"""On 8 tensor-parallel A100 80G for each pipeline rank, sequences of 2048, without data parallelism;
attention in single operations, with dropout."""

GRID_SCHEDULES = {"1F1B": "1f1b", "ZB-1P": "zb-h1", "V-Half": "v-half", "V-Min": "v-min", "V-ZB": "v-zb"}

GRID = {
    1024: {"1F1B": 49.81, "ZB-1P": 54.52, "V-Half": 52.60, "V-Min": 48.02, "V-ZB": 57.58},
    3072: {"1F1B": 57.25, "ZB-1P": 56.55, "V-Half": 60.34, "V-Min": 55.51, "V-ZB": 56.89},
}
"""arXiv 2405.15362: MFU in percent of the best of a grid search for 98.5B, by sequence length."""

GRID_ASSUMPTIONS = (
    "78 layers of 10240 (which makes 98.7B) and 80 heads, embedding and output layer each in the place of a "
    "layer, 40 A100 80G, batches of 160, fused attention, no dropout, no context parallelism, "
    "nothing recomputed"
)

LLAMA = {
    "1F1B": ("1f1b", 10057, 16.3),
    "interleaved": ("interleaved", 10974, 21.4),
    "ZBV": ("v-zb", 11347, 18.1),
    "V-Half": ("v-half", 10894, 14.1),
    "V-Min": ("v-min", 8897, 11.9),
}
"""Llama2-7B, 8 pipeline ranks on a node of MI300X: schedule, tokens per second per GPU, GB.

Assumed: sequences of 4096 in microbatches of 1, 64 of them, bf16, fused attention."""


class StageTimes(NamedTuple):
    """A row of arXiv 2401.10241, table 9: milliseconds of F, I and W of a stage between the ends."""

    name: str
    ranks: int
    layers: int
    heads: int
    hidden: int
    samples: int
    milliseconds: tuple[float, float, float]


STAGE_TIMES = (
    StageTimes("1.5B", 8, 22, 24, 2304, 6, (18.522, 18.086, 9.337)),
    StageTimes("6.2B", 8, 30, 32, 4096, 3, (29.718, 29.444, 19.927)),
    StageTimes("14.6B", 16, 46, 40, 5120, 1, (11.347, 11.248, 8.132)),
    StageTimes("28.3B", 32, 62, 48, 6144, 1, (10.419, 10.207, 7.715)),
)
"""On A100 80G, sequences of 1024, the sizes of table 3; embedding and loss each take a layer's place.
Attention in single operations is assumed."""
