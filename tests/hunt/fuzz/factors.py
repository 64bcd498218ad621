"""What a random job can choose: Megatron's flags in groups, and the choices that do not go together."""

from collections.abc import Iterator, Mapping
from functools import cache

from tests.support import frozen

Row = Mapping[str, str]
"""Factor -> level.  The first level of a factor is its plain one, and adds the least."""

DATA = "{data}"
"""Stands in flags for the folder in which ``samples`` has written data."""

_SHARDED = "--tensor-model-parallel-size 2 --sequence-parallel"
_EXPERTS = "--num-experts 4 --moe-router-topk 2"
_ALLTOALL = f"{_EXPERTS} --moe-token-dispatcher-type alltoall"
_SHARED = "--moe-shared-expert-intermediate-size 32"
_LOSSES = "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
_SEQUENCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_SELECTIVE = "--recompute-granularity selective"
_SPLIT = "--split 80,10,10"

FLAGS: Mapping[str, Mapping[str, str]] = {
    "pairs": {"none": "", "all": "--overlap-moe-expert-parallel-comm"},
    "parallel": {
        "none": "",
        "dp2": "",
        "tp2": "--tensor-model-parallel-size 2",
        "tp2-sp": _SHARDED,
        "cp2": "--context-parallel-size 2",
        "ep2": "--expert-model-parallel-size 2",
        "dp4": "",
        "tp2-sp-dp2": _SHARDED,
        "tp2-sp-cp2": f"{_SHARDED} --context-parallel-size 2",
        "tp2-sp-ep2": f"{_SHARDED} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    },
    "embeddings": {"tied": "", "untied": "--untie-embeddings-and-output-weights"},
    "position": {
        "learned": "",
        "rope": "--position-embedding-type rope",
        "rope-half": "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved",
        "none": "--position-embedding-type none",
    },
    "norm": {
        "layer": "",
        "rms": "--normalization RMSNorm",
        "query-key": "--qk-layernorm --norm-epsilon 1e-4",
    },
    "attention": {
        "plain": "",
        "grouped": "--group-query-attention --num-query-groups 2",
        "window": "--window-size 4,0",
        "biased": "--add-qkv-bias --attention-softmax-in-fp32",
    },
    "mlp": {
        "gelu": "",
        "swiglu": "--swiglu",
        "squared-relu": "--squared-relu --ffn-hidden-size 48",
        "post-residual": "--apply-residual-connection-post-layernorm",
    },
    "experts": {
        "none": "",
        "aux": f"{_EXPERTS} {_LOSSES}",
        "sequence": f"{_EXPERTS} {_SEQUENCE}",
        "alltoall": f"{_ALLTOALL} --moe-router-load-balancing-type none --moe-router-pre-softmax",
        "alltoall-shared": f"{_ALLTOALL} {_SHARED} {_LOSSES}",
        "alltoall-drops": f"{_ALLTOALL} {_SEQUENCE} --moe-expert-capacity-factor 1.0",
        "shared": f"{_EXPERTS} {_SHARED} --moe-aux-loss-coeff 0.01",
        "biased": f"{_EXPERTS} --moe-router-load-balancing-type none --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
        "alternating": "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq 2",
    },
    "frozen": {"none": "", **{kind: f"{frozen.FLAG} {kind}" for kind in frozen.KINDS}},
    "biases": {"yes": "", "no": "--disable-bias-linear"},
    "prediction": {
        "none": "",
        "one": "--mtp-num-layers 1",
        "two": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
    },
    "precision": {
        "fp32": "",
        "bf16": "--bf16",
        "bf16-gradients": "--bf16 --grad-reduce-in-bf16",
        "fp16": "--fp16 --initial-loss-scale 256",
        "fp16-fp32-gradients": "--fp16 --initial-loss-scale 256 --accumulate-allreduce-grads-in-fp32",
        "fp16-overflows": "--fp16 --initial-loss-scale 16777216 --hysteresis 1",
    },
    "dropout": {"off": "", "on": "--attention-dropout 0.1 --hidden-dropout 0.2"},
    "recompute": {
        "none": "",
        "uniform": f"{_FULL} uniform",
        "block": f"{_FULL} block",
        "distributed": f"{_FULL} uniform --distribute-saved-activations",
        "core": _SELECTIVE,
        "mlp": f"{_SELECTIVE} --recompute-modules mlp",
        "experts": f"{_SELECTIVE} --recompute-modules moe",
    },
    "update": {
        "adam": "",
        "sgd": "--optimizer sgd --lr 0.1",
        "decay": "--weight-decay 0.1 --adam-beta1 0.5 --adam-beta2 0.8 --adam-eps 1e-4",
        "warm-up": "--lr-warmup-iters 2 --lr-decay-style linear --lr-decay-iters 8 --min-lr 0.001",
        "decoupled": "--decoupled-lr 0.002 --decoupled-min-lr 0.0002",
    },
    "optimizer": {
        "plain": "",
        "overlap": "--overlap-grad-reduce",
        "distributed": "--use-distributed-optimizer",
        "distributed-reduce": "--use-distributed-optimizer --overlap-grad-reduce",
        "distributed-overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    },
    "buckets": {
        "default": "",
        "small": "--ddp-bucket-size 2000",
        "three": "--ddp-num-buckets 3",
        "unaligned": "--ddp-bucket-size 5000 --no-align-grad-reduce --no-align-param-gather",
    },
    "clipping": {"off": "--clip-grad 0", "engages": "--clip-grad 0.1", "default": ""},
    "loss": {"by-microbatch": "", "by-token": "--calculate-per-token-loss"},
    "data": {
        "random": f"--data-path {DATA}/long {_SPLIT}",
        "short": f"--data-path {DATA}/short {_SPLIT}",
        "blend": f"--data-path 0.3 {DATA}/long 0.7 {DATA}/short {_SPLIT}",
        "mock": "",
    },
    "masks": {
        "none": "",
        "positions": "--reset-position-ids",
        "attention": "--reset-attention-mask",
        "loss": "--eod-mask-loss",
        "all": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
        "no-masks": "--no-create-attention-mask-in-dataloader",
    },
    "evaluation": {
        "none": "",
        "each-step": "--eval-interval 1 --eval-iters 2",
        "late": "--eval-interval 2 --eval-iters 1",
    },
    "vocabulary": {"even": "", "odd": "--vocab-size 61", "padded": "--make-vocab-size-divisible-by 48"},
    "sharing": {"none": "", "all-ranks": "--pipeline-vocabulary shared"},
    "ends": {"first": "", "last": "--pipeline-loss-rank last"},
    "samples": {"1": "", "2": "--micro-batch-size 2"},
    "log": {"plain": "", "all": "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2"},
}
"""Factors whose levels are flags alone."""

SIZES: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("2", "3", "4"),
    "microbatches": ("4", "1", "2", "3", "5", "6", "7", "8", "9", "growing"),
    "chunks": ("2", "1", "3", "4"),
    "cut": ("even", "layout", "ends", "first", "last"),
    "checkpoint": ("none", "sync", "async", "persistent"),
    "store": ("plain", "unnamed-factory", "jagged"),
}
"""Factors from which ``job`` computes flags, and ``stores`` a loss function.

``chunks`` is the most that a rank may have.
"""

WITHOUT_GRAPHS: Mapping[str, str] = {
    "precision": "fp32 fp16 fp16-fp32-gradients fp16-overflows",
    "frozen": "adapters",
    "parallel": "tp2 tp2-sp cp2 tp2-sp-dp2 tp2-sp-cp2 tp2-sp-ep2",
    "dropout": "on",
    "recompute": "uniform block distributed core mlp experts",
    "checkpoint": "sync async persistent",
}
"""Levels of factors that jobs with graphs cannot have.

The stub of capture does not record what tensor ranks exchange, and no generator of a CPU has the states that
dropout, recomputation and checkpoints ask for then.  Megatron captures in bf16."""

OTHERS = "others"
"""Stands in FORBIDDEN for every level of a factor but the plain one."""

_SPARSE = "alternating"
_ENDS = "first last ends"

FORBIDDEN: Mapping[str, Row] = {
    "eight ranks are enough": {"pipeline": "3 4", "parallel": "dp4 tp2-sp-dp2 tp2-sp-cp2 tp2-sp-ep2"},
    "experts want --sequence-parallel": {"parallel": "tp2", "experts": OTHERS},
    "expert parallelism needs experts": {"parallel": "ep2 tp2-sp-ep2", "experts": "none"},
    "pairs hide what experts on several ranks send": {
        "pairs": OTHERS,
        "parallel": "none dp2 tp2 tp2-sp cp2 dp4 tp2-sp-dp2 tp2-sp-cp2",
    },
    "Megatron plans layers of the dispatcher alltoall": {
        "pairs": OTHERS,
        "experts": "none aux sequence shared biased alternating",
    },
    "Megatron plans layers in half precision": {"pairs": OTHERS, "precision": "fp32"},
    "Megatron plans layers that it takes apart": {
        "pairs": OTHERS,
        "recompute": "uniform block distributed experts",
    },
    "a plan knows one prediction": {"pairs": OTHERS, "prediction": "two"},
    "pairs have no place for the exchanges of a shared vocabulary": {"pairs": OTHERS, "sharing": OTHERS},
    "experts have no biases in Megatron's local layers": {"experts": OTHERS, "biases": "yes"},
    "a prediction has logits of its own": {"sharing": OTHERS, "prediction": OTHERS},
    "prediction needs rotated or no positions": {"prediction": OTHERS, "position": "learned"},
    "Megatron cannot save tied embeddings beside a prediction's": {
        "checkpoint": OTHERS,
        "embeddings": "tied",
        "prediction": OTHERS,
    },
    "Megatron waits for the gradient of the output layer that a prediction's embeddings stand in for": {
        "buckets": "unaligned",
        "embeddings": "tied",
        "prediction": OTHERS,
        "optimizer": "overlap distributed-reduce distributed-overlap",
    },
    "Megatron cannot load what it saved before fp16's first step that it does not skip": {
        "checkpoint": OTHERS,
        "precision": "fp16-overflows",
    },
    "Megatron cannot save the optimizer of a rank that trains nothing": {
        "checkpoint": OTHERS,
        "frozen": "layers",
    },
    "Megatron cannot load the state of SGD": {"checkpoint": OTHERS, "update": "sgd"},
    "Megatron cannot load SwiGLU's optimizer state on a rank without one of the groups of parameters": {
        "checkpoint": OTHERS,
        "update": "decoupled",
        "mlp": "swiglu",
        "precision": "bf16 bf16-gradients fp16 fp16-fp32-gradients",
        "optimizer": "plain overlap",
        "pipeline": "3 4",
    },
    "the distributed optimizer is for Adam": {
        "update": "sgd",
        "optimizer": "distributed distributed-reduce distributed-overlap",
    },
    "experts are there to be recomputed": {"recompute": "experts", "experts": "none"},
    "full recomputation brings no gradient to layers whose input needs none": {
        "recompute": "uniform block distributed",
        "frozen": "embedding vocabulary layers",
    },
    "tied ends are frozen together, and full recomputation brings no gradient to layers then either": {
        "recompute": "uniform block distributed",
        "frozen": "output",
        "embeddings": "tied",
    },
    "recomputing an MLP with biases never ends": {"recompute": "mlp", "biases": "yes"},
    "a layer of experts has no MLP to recompute": {"recompute": "mlp", "experts": OTHERS},
    "saved activations are distributed over tensor ranks, where these have whole ones": {
        "recompute": "distributed",
        "parallel": "none dp2 tp2-sp cp2 ep2 dp4 tp2-sp-dp2 tp2-sp-cp2 tp2-sp-ep2",
    },
    "Megatron samples a blend's validation, which then has to have samples": {
        "data": "blend",
        "evaluation": "none",
    },
    "another vocabulary ends documents otherwise": {"vocabulary": "odd", "data": "random short blend"},
    "the CPU's context parallelism is for causal attention": {
        "parallel": "cp2 tp2-sp-cp2",
        "attention": "window",
    },
    "dropout follows the placement": {"dropout": "on", "chunks": "2 3 4"},
    "the ends of a model count in whole layers": {"cut": _ENDS, "chunks": "3 4"},
    "a layout is given for one stage a rank, or two": {"cut": "layout", "chunks": "3 4"},
    "sixteen layers take too long": {"chunks": "4", "pipeline": "4"},
    "layers with and without experts repeat": {"experts": _SPARSE, "cut": OTHERS},
    "batches that grow are counted in samples of one": {"microbatches": "growing", "samples": "2"},
    "with samples to train on there is no warm-up in steps": {"microbatches": "growing", "update": "warm-up"},
}
"""Choices of several factors that make no job together, each with the reason.  Plain levels make one."""


def levels(factor: str) -> tuple[str, ...]:
    """All levels of ``factor``, the plain one first."""
    return SIZES[factor] if factor in SIZES else tuple(FLAGS[factor])


FACTORS = (*SIZES, *FLAGS)


def is_legal(row: Row, factor: str | None = None) -> bool:
    """Whether a row, of which factors may be missing, is not forbidden; by the rules on ``factor`` alone."""
    rules = (choices for choices in FORBIDDEN.values() if factor is None or factor in choices)
    return not any(_holds(choices, row) for choices in rules)


def _holds(choices: Row, row: Row) -> bool:
    return all(factor in row and row[factor] in _meant(factor, names) for factor, names in choices.items())


@cache
def _meant(factor: str, names: str) -> tuple[str, ...]:
    return levels(factor)[1:] if names == OTHERS else tuple(names.split())


def unusual(row: Row) -> Iterator[str]:
    """The factors of ``row`` that are not plain."""
    return (factor for factor in FACTORS if row[factor] != levels(factor)[0])
