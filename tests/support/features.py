"""Megatron's features as a table: a job's choices, and rows that bring every two choices together once.

A failure needs two features to meet far more often than three, so a covering array of pairs (Cohen et al.,
"The AETG System", IEEE TSE 1997) finds most of what the full product, some 70,000 jobs, would find.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate, combinations
from typing import NamedTuple

from tests.support import frozen
from tests.support.training import TINY

Row = Mapping[str, str]
"""Factor -> level."""

Choice = tuple[str, str]
Pair = tuple[Choice, Choice]
"""Two choices, (factor, level) each, in the order of the alphabet."""

PIPELINE = "--pipeline-model-parallel-size"
SEQUENCE = int(TINY[TINY.index("--seq-length") + 1])


class Layout(NamedTuple):
    """Ranks and how they are dealt out; ``replicas`` read different data."""

    ranks: int
    pipeline: int
    replicas: int
    flags: str = ""


LAYOUTS = {
    "pp4": Layout(4, 4, 1),
    "pp2-dp2": Layout(4, 2, 2),
    "pp2-tp2": Layout(4, 2, 1, "--tensor-model-parallel-size 2"),
    "pp2-tp2-sp": Layout(4, 2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2-ep2": Layout(4, 2, 2, "--expert-model-parallel-size 2"),
    "pp2-cp2": Layout(4, 2, 1, "--context-parallel-size 2"),
    "pp2-tp2-sp-dp2": Layout(8, 2, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2-tp2-sp-cp2": Layout(
        8, 2, 1, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
    ),
}

SCHEDULES = {
    name: f"--pipeline-schedule {name}" for name in ("1f1b", "zb-h1", "v-half", "v-zb", "interleaved")
} | {
    "flex": "--pipeline-schedule flex --pipeline-memory-limit 1.25",
    "in-pairs": "--pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm",
}

MICROBATCHES = {
    "even": {2: (4,), 4: (8,)},
    "odd": {2: (5,), 4: (7,)},
    "fewer-than-ranks": {2: (1,), 4: (3,)},
    "ramp-up": {2: (1, 2, 4), 4: (2, 4, 6)},
}
"""The microbatches of each replica in each step, by the number of stages; one number is that of two steps."""

FLAGS = {
    "precision": {
        "fp32": "",
        "bf16": "--bf16",
        "bf16-gradients": "--bf16 --grad-reduce-in-bf16",
        "fp16": "--fp16 --initial-loss-scale 256",
        "fp16-fp32-gradients": "--fp16 --initial-loss-scale 256 --accumulate-allreduce-grads-in-fp32",
    },
    "optimizer": {
        "plain": "",
        "overlap": "--overlap-grad-reduce --no-align-grad-reduce",
        "distributed": "--use-distributed-optimizer",
        "distributed-overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    },
    "model": {
        "gpt-tied": "",
        "llama-like": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
        "experts": "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
        "--disable-bias-linear",
    },
    "recompute": {
        "none": "",
        "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "selective": "--recompute-granularity selective",
    },
    "dispatcher": {"all-gather": "", "all-to-all": "--moe-token-dispatcher-type alltoall"},
    "frozen": {
        "none": "",
        **{kind: f"{frozen.FLAG} {kind}" for kind in ("vocabulary", "layers", "adapters")},
    },
    "clipping": {"engages": "--clip-grad 0.1", "off": "--clip-grad 0"},
    "loss": {"by-microbatch": "", "by-token": "--calculate-per-token-loss"},
}
"""Factors whose levels are flags alone."""

FACTORS: dict[str, tuple[str, ...]] = {
    "layout": tuple(name for name in LAYOUTS if LAYOUTS[name].ranks == 4),
    "schedule": tuple(SCHEDULES),
    "model": tuple(FLAGS["model"]),
    "precision": tuple(FLAGS["precision"]),
    "recompute": tuple(FLAGS["recompute"]),
    "microbatches": tuple(MICROBATCHES),
    "optimizer": tuple(FLAGS["optimizer"]),
    "dispatcher": tuple(FLAGS["dispatcher"]),
    "frozen": tuple(FLAGS["frozen"]),
    "clipping": tuple(FLAGS["clipping"]),
    "loss": tuple(FLAGS["loss"]),
}

EXCLUDED: dict[Pair, str] = {
    (("layout", "pp2-tp2"), ("model", "experts")): "Megatron wants --sequence-parallel",
    (("layout", "pp2-ep2"), ("model", "gpt-tied")): "expert parallelism needs experts",
    (("layout", "pp2-ep2"), ("model", "llama-like")): "expert parallelism needs experts",
    (("dispatcher", "all-to-all"), ("layout", "pp2-tp2")): "Megatron wants --sequence-parallel with experts",
    (("dispatcher", "all-to-all"), ("model", "gpt-tied")): "tokens are dispatched to experts",
    (("dispatcher", "all-to-all"), ("model", "llama-like")): "tokens are dispatched to experts",
    **{
        ((factor, level), ("schedule", "in-pairs")): "pairs hide what experts on several ranks send"
        for factor, levels in (
            ("layout", LAYOUTS.keys() - {"pp2-ep2"}),
            ("model", {"gpt-tied", "llama-like"}),
        )
        for level in levels
    },
    (("dispatcher", "all-gather"), ("schedule", "in-pairs")): "Megatron plans layers of the other dispatcher",
    (("precision", "fp32"), ("schedule", "in-pairs")): "Megatron plans layers in half precision",
    **{
        (("frozen", kind), ("recompute", level)): "Megatron recomputes without a gradient for frozen inputs"
        for kind in ("vocabulary", "layers")
        for level in ("uniform", "block")
    },
    **{
        (("frozen", kind), ("schedule", "in-pairs")): "Megatron's plans fail where an input takes no gradient"
        for kind in ("vocabulary", "layers")
    },
    (("recompute", "uniform"), ("schedule", "in-pairs")): "Megatron plans layers that it takes apart",
    (("recompute", "block"), ("schedule", "in-pairs")): "Megatron plans layers that it takes apart",
}
"""Two choices that make no job, with the reason."""

WIDE = {"v-zb", "flex", "pp2-tp2", "bf16-gradients", "fp16-fp32-gradients", "block"}
"""Choices whose own rows are wide: they differ from others in their order or a rounding, or are a part."""
FEWER = {name: tuple(level for level in levels if level not in WIDE) for name, levels in FACTORS.items()}

LARGE_ROWS: tuple[Row, ...] = (
    {
        "layout": "pp2-tp2-sp-dp2",
        "schedule": "v-half",
        "model": "gpt-tied",
        "precision": "fp32",
        "recompute": "selective",
        "microbatches": "odd",
        "optimizer": "distributed-overlap",
        "dispatcher": "all-gather",
        "frozen": "adapters",
        "clipping": "engages",
        "loss": "by-token",
    },
    {
        "layout": "pp2-tp2-sp-cp2",
        "schedule": "zb-h1",
        "model": "experts",
        "precision": "bf16",
        "recompute": "none",
        "microbatches": "ramp-up",
        "optimizer": "plain",
        "dispatcher": "all-to-all",
        "frozen": "vocabulary",
        "clipping": "engages",
        "loss": "by-microbatch",
    },
)
"""Three parallelisms at once: eight ranks take too long on two cores to be in every pair."""


def covering_rows(
    factors: Mapping[str, tuple[str, ...]], excluded: Collection[Pair], known: Collection[Row] = ()
) -> list[Row]:
    """Rows that bring, besides the ``known`` ones, every pair of levels but the excluded; nearly the fewest.

    Greedy: a row starts as a pair that no row has yet, and takes in each further factor the level that
    brings the most such pairs, of several the one used least.
    """
    missing = all_pairs(factors).difference(excluded, *map(pairs_of, known))
    uses: Counter[Choice] = Counter()
    rows: list[Row] = []
    while missing:
        row = dict(min(missing))
        for factor, levels in factors.items():
            with_level = {level: pairs_of({**row, factor: level}) for level in levels}
            legal = [level for level in levels if with_level[level].isdisjoint(excluded)]
            row[factor] = row.get(factor) or max(
                legal, key=lambda level: (len(missing & with_level[level]), -uses[factor, level])
            )
        missing -= pairs_of(row)
        uses.update(row.items())
        rows.append({factor: row[factor] for factor in factors})
    return rows


def every_level_once(rows: Collection[Row]) -> list[Row]:
    """Some of ``rows`` in which every level of every factor occurs, greedily those with the most new ones.

    They bring a further choice, the same in all of them, together with each level.
    """
    missing = {choice for row in rows for choice in row.items()}
    chosen_rows: list[Row] = []
    while missing:
        chosen_rows.append(max(rows, key=lambda row: len(missing & row.items())))
        missing -= chosen_rows[-1].items()
    return chosen_rows


def pairs_of(row: Row) -> set[Pair]:
    """Every two choices of a row."""
    return set(combinations(sorted(row.items()), 2))


def all_pairs(factors: Mapping[str, tuple[str, ...]]) -> set[Pair]:
    """Every two choices there are, of different factors."""
    choices = sorted((factor, level) for factor, levels in factors.items() for level in levels)
    return {(first, second) for first, second in combinations(choices, 2) if first[0] != second[0]}


def job(row: Row) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """The ranks, the flags and the schedule's flags of a full row."""
    layout = LAYOUTS[row["layout"]]
    # Two layers a rank: as many as a V needs.
    flags = [f"{PIPELINE} {layout.pipeline} --num-layers {2 * layout.pipeline}", layout.flags]
    flags += [levels[row[factor]] for factor, levels in FLAGS.items()]
    words = " ".join(flags).split()
    words += _batches([count * layout.replicas for count in microbatches(row)])
    return layout.ranks, tuple(words), tuple(SCHEDULES[row["schedule"]].split())


def microbatches(row: Row) -> tuple[int, ...]:
    """How many microbatches each replica has in each step; a single number is that of two steps."""
    return MICROBATCHES[row["microbatches"]][LAYOUTS[row["layout"]].pipeline]


def _batches(sizes: list[int]) -> list[str]:
    """Flags for steps of these sizes; a larger size comes once so many tokens are through."""
    if len(sizes) == 1:
        return ["--global-batch-size", str(sizes[0])]
    tokens = [SEQUENCE * samples for samples in accumulate([0, *sizes[:-1]])]
    steps = " ".join(f"{start}:{size}" for start, size in zip(tokens, sizes, strict=True))
    return ["--step-batch-size-schedule", steps, "--train-samples", str(sum(sizes))]
