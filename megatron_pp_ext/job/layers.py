"""The cut of a model's layers into pipeline stages, as Megatron's flags request it, and the text of a layout.

Stages are counted in model order.  They have the layers that ``get_num_layers_to_build``
(``megatron.core.transformer.transformer_block``), ``PipelineParallelLayerLayout``
(``megatron.core.transformer.pipeline_parallel_layer_layout``) and ``select_pipeline_segment``
(``megatron.core.models.hybrid.hybrid_layer_allocation``) will build; tests compare the two.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import batched, groupby, pairwise
from typing import Any

from megatron_pp_ext.job.flag_table import MOST_LAYERS
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.placement import Placement


def require_same(layout: str, stages: Sequence[str], layers: int, mtp_layers: int) -> None:
    """Raise ValueError unless ``stages``, a letter a layer, are a model of ``layers`` and ``mtp_layers``.

    They are the flag's text ``layout``.  ``layers`` is 0 where nobody gives their number, and
    ``mtp_layers`` is the number of layers of multi-token prediction (MTP).  The rules are those of
    ``PipelineParallelLayerLayout.validate_layer_layout`` in Megatron, which hold under every placement.
    """
    letters = "".join(stages)
    has, predicting = letters.count("t"), [stage for stage in stages if "m" in stage]
    fault, fix = "", ""
    if letters[:1] != "E" or letters.count("E") > 1:
        fault, fix = "must begin with its only E, the embedding", "put one E before everything else"
    elif letters[-1:] != "L" or letters.count("L") > 1:
        fault, fix = "must end with its only L, the output layer", "put one L after everything else"
    elif layers and has != layers:
        fault, fix = (
            f"has {has} layers (t), but --num-layers is {layers}",
            f"give it {layers}, or change the latter",
        )
    elif letters.count("m") != mtp_layers:
        fault = f"has {letters.count('m')} m, but --mtp-num-layers is {mtp_layers}"
        fix = f"give it {mtp_layers}, or change the latter"
    elif "t" in letters.partition("m")[2]:
        fault, fix = "has a layer (t) after multi-token prediction (m)", "put every m after the last t"
    elif len(predicting) > 1:
        fault, fix = (
            f"has multi-token prediction (m) in {len(predicting)} stages",
            "put every m into one stage",
        )
    if fault:
        raise ValueError(f"--pipeline-model-parallel-layout {layout} {fault}; {fix}")


_LAYOUT_PIECE = re.compile(r"\(([^()]*)\)\*(\d+)|([^()*,])(?:\*(\d+))?|,")
_LAYOUT_LETTERS = "EtLm|"
_LETTER_OF_KIND = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@lru_cache(maxsize=64)
def stages_of(layout: str) -> tuple[str, ...]:
    """The stages of a layout as the flag has it, a letter a layer.

    E is the embedding, t a transformer layer, m multi-token prediction and L the output layer with the
    loss.  ValueError for a layout that Megatron cannot read.
    """
    return tuple(_unrolled(layout, layout).split("|"))


def _unrolled(text: str, whole: str) -> str:
    """``text`` with every ``x*n`` and ``(...)*n`` written out and without commas."""
    letters, end = "", 0
    while end < len(text):
        piece = _LAYOUT_PIECE.match(text, end)
        if piece is None or (piece[3] and piece[3] not in _LAYOUT_LETTERS):
            raise ValueError(
                f"--pipeline-model-parallel-layout {whole} has {text[end]!r} where one of E t m L | or a "
                "repetition such as t*3 or (tt|)*3 must stand; correct it"
            )
        end = piece.end()
        repeated = piece[3] or "" if piece[1] is None else _unrolled(piece[1], whole)
        times = int(piece[2] or piece[4] or 1)
        if len(letters) + len(repeated) * times > 2 * MOST_LAYERS:
            raise ValueError(
                f"--pipeline-model-parallel-layout {whole} has more than {MOST_LAYERS:,} layers and as many "
                "stages, the most of a model; correct it"
            )
        letters += repeated * times
    return letters


def spelled(stages: Sequence[str]) -> str:
    """``stages``, a letter a layer, as --pipeline-model-parallel-layout, which ``layout`` reads back.

    Equal neighbours are written once: ``Et*3|(t*4|)*14t*2L``.
    """
    texts = [
        "".join(f"{run[0]}*{len(run)}" if len(run) > 1 else run[0] for run in _runs(stage))
        for stage in stages
    ]
    words = [f"({run[0]}|)*{len(run)}" if len(run) > 2 else "|".join(run) + "|" for run in _runs(texts[:-1])]
    return "".join(words) + texts[-1]


def spelled_layout(layout: Any) -> str:
    """``layout``, in one of the forms that a config of Megatron takes or has, as the flag has it.

    They are the flag's own, lists of kinds of layers ("embedding", "decoder", "mtp", "loss", or LayerType)
    with one list a stage, and the PipelineParallelLayerLayout that Megatron makes of either.
    """
    value = getattr(layout, "input_data", layout)
    if isinstance(value, str):
        return value
    kinds = [[getattr(kind, "name", kind).strip().lower() for kind in stage] for stage in value]
    return spelled(["".join(_LETTER_OF_KIND[kind] for kind in stage) for stage in kinds])


def _runs(values: Iterable[str]) -> list[list[str]]:
    """``values`` with equal neighbours together."""
    return [list(run) for _, run in groupby(values)]


ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")

LAYOUT = "--pipeline-model-parallel-layout"

SPREAD = (*ENDS, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""The flags with which Megatron builds no model from a layout: they spread layers in another way."""

CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")


def spread(job: Job) -> int:
    """The number of layers that are spread over stages, embedding and loss among them where they count."""
    split = job.pipeline
    extra = split.account_for_embedding_in_pipeline_split + split.account_for_loss_in_pipeline_split
    return job.model.layers + extra


def layout(job: Job) -> tuple[str, ...] | None:
    """The stages of --pipeline-model-parallel-layout, a letter a layer; None without the flag.

    ValueError for a layout that Megatron cannot read, and for another model's.
    """
    text = job.pipeline.pipeline_model_parallel_layout
    if text is None:
        return None
    stages = stages_of(text)
    require_same(text, stages, job.model.layers, job.model.mtp_num_layers)
    return stages


def _value(job: Job, flag: str) -> Any:
    return job.value(flag.removeprefix("--").replace("-", "_"))


def stages_flag(job: Job) -> str | None:
    """The flag that fixes the number of stages or their layers, None where a schedule may choose it."""
    for flag in (LAYOUT, *ENDS, "--num-layers-per-virtual-pipeline-stage"):
        if _value(job, flag) is not None:
            return flag
    return "--hybrid-layer-pattern" if "|" in (job.model.pattern or "") else None


def stages_described(job: Job) -> int | None:
    """The number of stages that a layout, or a pattern with |, describes; None where neither does."""
    stages = layout(job)
    if stages is not None:
        return len(stages)
    segments = job.model.pattern
    return segments.count("|") + 1 if segments and "|" in segments else None


def predicting_stage(job: Job, stages: int) -> int | None:
    """The one of ``stages`` stages that has MTP layers and their copy of the embedding; or None.

    It is the last unless a layout puts the m elsewhere.
    """
    if not job.model.mtp_num_layers:
        return None
    described = layout(job) or ()
    return next((number for number, stage in enumerate(described) if "m" in stage), stages - 1)


def predicts_before_the_end(job: Job) -> bool:
    """Whether a layout puts MTP into another stage than the last."""
    return job.pipeline.has_layout and any("m" in stage for stage in (layout(job) or ())[:-1])


def stages_for_prediction(placement: Placement) -> list[int]:
    """Return the stages where Megatron can build and train MTP layers.

    Megatron builds it in the last chunk of a rank (``MultiTokenPredictionBlock``).  On the first rank it sums
    the gradients of the first stage's embedding with other ranks' (``_allreduce_embedding_grad`` in
    ``megatron.core.distributed.finalize_model_grads``) and would leave out a copy in another of its stages.
    Where the last rank has embedding and head, that sum is not Megatron's (``embedding_copies``).
    """
    stages = placement.stages
    return [
        stage
        for stage in range(stages - placement.ranks, stages)
        if placement.rank_of(stage) != 0 or stage in (0, stages - 1) or placement.ends_on_last
    ]


def joined(job: Job, stages: int) -> dict[str, str]:
    """The stages that a layout or a pattern describes, joined to fewer ``stages``, as its argument has them.

    Each is made of as many neighbours, which have to be so many.  Empty where neither describes stages.
    """
    described, pattern = layout(job), job.model.hybrid_layer_pattern or ""
    if described is not None:
        return {"pipeline_model_parallel_layout": spelled(_neighbours(described, stages))}
    segments, slash, mtp = pattern.partition("/")
    if "|" not in segments:
        return {}
    return {"hybrid_layer_pattern": "|".join(_neighbours(segments.split("|"), stages)) + slash + mtp}


def _neighbours(described: Sequence[str], stages: int) -> list[str]:
    return ["".join(group) for group in batched(described, len(described) // stages)]


def can_predict(job: Job, placement: Placement) -> bool:
    """Whether ``job`` puts MTP nowhere, or where Megatron can build and train it."""
    stage = predicting_stage(job, placement.stages)
    return stage is None or stage in stages_for_prediction(placement)


def by_stage(job: Job, stages: int) -> list[int]:
    """The number of layers of each of ``stages`` stages; ValueError where the layers do not fill them."""
    described = layout(job)
    if described is not None:
        return [stage.count("t") for stage in described]
    segments = job.model.pattern
    if segments and "|" in segments:
        return [len(segment) for segment in segments.split("|")]
    if given_ends(job):
        ranks = job.parallel.pipeline_model_parallel_size
        by_rank, chunks = _by_rank(job), stages // ranks
        if any(layers % chunks for layers in by_rank):
            raise ValueError(
                f"ranks of {by_rank} layers cannot be cut into {chunks} chunks each; {_ends_fix(job)}"
            )
        return [by_rank[stage % ranks] // chunks for stage in range(stages)]
    return _evenly(job, stages)


def _evenly(job: Job, stages: int) -> list[int]:
    per_stage, excess = divmod(spread(job), stages)
    if excess:
        extra = spread(job) - job.model.layers
        below, above = per_stage * stages - extra, (per_stage + 1) * stages - extra
        nearest = f"{below} or {above}" if below > 0 else f"{above}"
        raise ValueError(
            f"--num-layers {job.model.layers} does not fill {stages} stages evenly; "
            f"{_uneven_fix(job, stages)}, or set it to {nearest}"
        )
    even = [per_stage] * stages
    even[0] -= job.pipeline.account_for_embedding_in_pipeline_split
    even[-1] -= job.pipeline.account_for_loss_in_pipeline_split
    return even


def _uneven_fix(job: Job, stages: int) -> str:
    """Describe how the model of ``job`` gets ``stages`` with different numbers of layers."""
    if job.model.pattern:
        return f"write --hybrid-layer-pattern as {cut_evenly(job.model.pattern, stages)}, for example"
    if job.pipeline.pipeline_replicas is not None:
        return f"describe uneven stages with {LAYOUT}{_in_place(job)}"
    return f"let {LAYOUT} {AUTO}{_in_place(job)} choose uneven stages"


def _by_rank(job: Job) -> list[int]:
    """The number of layers of each rank where the first or the last rank has a number of its own."""
    front, back = ([count] if (count := _value(job, flag)) is not None else [] for flag in ENDS)
    middle_ranks = job.parallel.pipeline_model_parallel_size - len(front) - len(back)
    remaining = job.model.layers - sum(front + back)
    if remaining < 0 or (remaining and middle_ranks < 1):
        flags = " and ".join(f"{flag} {_value(job, flag)}" for flag in given_ends(job))
        why = "" if remaining < 0 else " and there is no other rank"
        raise ValueError(
            f"{flags} make {sum(front + back)} layers, but --num-layers is {job.model.layers}{why}; "
            f"{_ends_fix(job)}"
        )
    per_rank, excess = divmod(remaining, max(middle_ranks, 1))
    if excess:
        raise ValueError(
            f"{remaining} layers cannot be shared evenly by {middle_ranks} other ranks; {_ends_fix(job)}"
        )
    return [*front, *[per_rank] * middle_ranks, *back]


def given_ends(job: Job) -> list[str]:
    """The flags that give the first or the last pipeline rank a number of layers of its own."""
    return [flag for flag in ENDS if _value(job, flag) is not None]


def _ends_fix(job: Job) -> str:
    flags = " or ".join(given_ends(job))
    return f"change {flags}, or describe the stages with {LAYOUT}{_in_place(job)}"


def _in_place(job: Job) -> str:
    """The flags of ``job`` that a layout takes the place of, in words."""
    flags = [flag for flag in (*SPREAD, *CHUNKS) if _value(job, flag)]
    return f" in place of {' and '.join(flags)}" if flags else ""


def as_v(job: Job) -> str:
    """The layout of a V that cuts each rank's layers in two, the smaller parts next to embedding and head."""
    by_rank = _by_rank(job)
    halves = [part for layers in by_rank for part in (layers - layers // 2, layers // 2)]
    halves[0], halves[1] = halves[1], halves[0]
    return "E" + "|".join("t" * layers for layers in halves) + "L"


def cut_evenly(letters: str, stages: int) -> str:
    """A hybrid pattern with | between ``stages`` stages whose lengths differ by one at most."""
    edges = [len(letters) * stage // stages for stage in range(stages + 1)]
    return "|".join(letters[start:end] for start, end in pairwise(edges))


def chunks_requested(job: Job) -> int | None:
    """The chunks a rank that Megatron's own flags request; None where they do not."""
    ranks, options = job.parallel.pipeline_model_parallel_size, job.pipeline
    stages = stages_described(job)
    if stages is not None:
        if stages % ranks:
            raise ValueError(
                f"{_stages_flag(job)} has {stages} stages, which {ranks} pipeline ranks cannot "
                f"share evenly; give it {ranks} or {2 * ranks} stages"
            )
        return stages // ranks
    if options.num_virtual_stages_per_pipeline_rank is not None:
        return options.num_virtual_stages_per_pipeline_rank
    per_stage = options.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        by_rank = spread(job) // ranks
        if by_rank % per_stage:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {by_rank} layers "
                "of a pipeline rank; set it to a number that does, or leave it out"
            )
        return max(1, by_rank // per_stage)
    return None


def require_chunks(
    job: Job, name: str, requested: int | None, chunks: int, accepted: bool, more: str
) -> None:
    """ValueError where Megatron's own flags request chunks that the schedule does not have."""
    stages = chunks * job.parallel.pipeline_model_parallel_size
    letters = job.model.pattern
    if requested is None and letters and chunks > 1:
        raise ValueError(
            f"--pipeline-schedule {name} has {stages} stages, between which --hybrid-layer-pattern needs "
            f"a |; write it as {cut_evenly(letters, stages)}, for example"
        )
    if accepted:
        return
    if stages_described(job) is not None:
        flag, fix = _stages_flag(job), f"give it {stages} stages"
    elif job.pipeline.num_virtual_stages_per_pipeline_rank is not None:
        flag, fix = "--num-virtual-stages-per-pipeline-rank", f"set it to {chunks}"
    else:
        flag, fix = "--num-layers-per-virtual-pipeline-stage", "leave it out"
    raise ValueError(
        f"--pipeline-schedule {name} has {chunks}{more} chunk(s) a rank, but {flag} requests "
        f"{requested}; {fix}, or choose another schedule"
    )


def _stages_flag(job: Job) -> str:
    return "--hybrid-layer-pattern" if job.model.pattern else "--pipeline-model-parallel-layout"
