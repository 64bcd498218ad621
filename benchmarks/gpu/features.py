"""Training on one GPU with activations on the host, in FP8, and with parallelism beside the pipeline.

Each part trains the small GPT of ``runs`` on four ranks that share the device, from one checkpoint on, and
compares losses with those of 1F1B under the same flags.  Ranks have one hardware queue (``shared_device``),
which Megatron demands for context parallelism, and the batch scripts set.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.runs import SCHEDULES, compare

SCHEDULED = {name: SCHEDULES[name] for name in ("v-half", "zb-h1")}

LONG = "--seq-length 512 --max-position-embeddings 512"
"""Tokens with which the largest storages are worth a copy (``features.offload.megatron.SMALLEST``)."""
WIDE = "--hidden-size 2048"
"""With this nearly all of its storages are, which takes CPUs too long."""


@dataclass(frozen=True)
class Feature:
    """A feature that a part trains with: flags for all of its runs, and further ones for each row.

    ``wide`` are flags that a dry run leaves out.  ``needs`` is the package without which it cannot run,
    ``logged`` what a row's log has to have.  Sums ``is_rounded`` of which make the first losses, too, differ.
    """

    title: str
    flags: str
    rows: Mapping[str, str] = field(default_factory=lambda: SCHEDULED)
    wide: str = ""
    needs: str = ""
    logged: str = ""
    is_rounded: bool = False

    def train(self, part: str, bench: Bench, rows: Rows) -> None:
        """Add the rows of the part."""
        if self.needs and find_spec(self.needs) is None:
            rows.add("all", {"found": f"{self.needs} is not installed"})
            return
        flags = shlex.split(self.flags) + ([] if bench.dry else shlex.split(self.wide))
        compare(bench, rows, part, flags, self.rows, self.logged, self.is_rounded)


FEATURES = {
    "offload": Feature(
        "Losses with activations on the host",
        LONG,
        {
            "v-half-half": "--pipeline-schedule v-half --pipeline-offload 0.5",
            "v-half-all": "--pipeline-schedule v-half --pipeline-offload 1",
            "flex-auto": "--pipeline-schedule flex --pipeline-memory-limit 0.4 --pipeline-offload auto",
        },
        wide=WIDE,
        logged=r"([\d.e-]*[1-9][\d.e-]* GB) of this rank's activations went to the host in the first step",
    ),
    "fp8": Feature(
        "Losses in FP8, delayed recipe",
        "--fp8-format hybrid --fp8-recipe delayed",
        needs="transformer_engine",
    ),
    "graphs": Feature(
        "Losses with CUDA graphs",
        "--te-rng-tracker --no-check-for-nan-in-loss-and-grad",
        {
            f"{name}-{kind}": f"--pipeline-schedule {name} --pipeline-unproved --cuda-graph-warmup-steps 1 "
            f"--cuda-graph-impl {impl}"
            for kind, impl in (("whole", "full_iteration"), ("layers", "transformer_engine"))
            for name in ("1f1b", "interleaved", "zb-h1", "v-half")
        },
        needs="transformer_engine",
    ),
    "sliced": Feature(
        "Losses in slices of sequences",
        f"{LONG} --position-embedding-type rope",
        {
            f"{name}-4": f"--pipeline-schedule {name} --pipeline-slice-tokens 128"
            for name in ("1f1b", "zb-h1", "v-half")
        },
        is_rounded=True,
    ),
    "cp": Feature(
        "Losses with context parallelism, p = 2",
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --position-embedding-type rope",
    ),
    "ep": Feature(
        "Losses with experts on two ranks, p = 2",
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear",
    ),
    "ddp": Feature(
        "Losses with a distributed optimizer that overlaps, p = 2",
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --dist-ckpt-optim-fully-reshardable",
    ),
}
