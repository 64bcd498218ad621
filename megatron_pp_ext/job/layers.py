"""The cut of a model's layers into pipeline stages, as Megatron's flags request it.

Stages are counted in model order.  The functions here return, before anything is built, the layers that
``get_num_layers_to_build`` (``megatron.core.transformer.transformer_block``),
``PipelineParallelLayerLayout`` (``megatron.core.transformer.pipeline_parallel_layer_layout``) and
``select_pipeline_segment`` (``megatron.core.models.hybrid.hybrid_layer_allocation``) will build; tests
compare the two.
"""

import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

from megatron_pp_ext.schedule.placement import Placement

ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")

LAYOUT = "--pipeline-model-parallel-layout"

SPREAD = (*ENDS, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""The flags beside which Megatron builds no model from a layout: they spread layers in another way."""

_CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")

_LAYOUT_PIECE = re.compile(r"\(([^()]*)\)\*(\d+)|([^()*,])(?:\*(\d+))?|,")
_LAYOUT_LETTERS = "EtLm|"


def pattern(args: Namespace) -> str | None:
    """The layers of --hybrid-layer-pattern, a letter each, with a | between stages; None without one.

    What follows a slash is multi-token prediction, which belongs to the last stage.
    """
    given = args.hybrid_layer_pattern or args.hybrid_override_pattern
    return given.partition("/")[0] if given else None


def count(args: Namespace) -> int:
    """The number of layers of the model; 0 where the flags do not give it."""
    letters = pattern(args)
    return len(letters.replace("|", "")) if letters else int(args.num_layers or 0)


def spread(args: Namespace) -> int:
    """The number of layers that are spread over the stages, with the ends that count as layers."""
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(count(args) + ends)


def layout(args: Namespace) -> list[str] | None:
    """The stages of --pipeline-model-parallel-layout, a letter a layer; None without the flag.

    E is the embedding, t a transformer layer, m multi-token prediction and L the output layer with the
    loss.  ValueError for a layout that Megatron cannot read.
    """
    given = args.pipeline_model_parallel_layout
    return None if given is None else _unrolled(given, given).split("|")


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
        if piece[1] is not None:
            letters += _unrolled(piece[1], whole) * int(piece[2])
        elif piece[3]:
            letters += piece[3] * int(piece[4] or 1)
    return letters


def spelled(stages: Sequence[str]) -> str:
    """``stages``, a letter a layer, as --pipeline-model-parallel-layout, which ``layout`` reads back.

    Equal neighbours are written once: ``Et*3|(t*4|)*14t*2L``.
    """
    texts = ["".join(map(_repeated, map("".join, _runs(stage)))) for stage in stages]
    words = [f"({run[0]}|)*{len(run)}" if len(run) > 2 else "|".join(run) + "|" for run in _runs(texts[:-1])]
    return "".join(words) + texts[-1]


def _repeated(run: str) -> str:
    return f"{run[0]}*{len(run)}" if len(run) > 1 else run


def _runs(values: Iterable[str]) -> list[list[str]]:
    """``values`` with equal neighbours together."""
    return [list(run) for _, run in groupby(values)]


def value(args: Namespace, flag: str) -> Any:
    """Return the value of ``flag``; None where this release of Megatron lacks it."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def stages_flag(args: Namespace) -> str | None:
    """The flag that fixes the number of stages or their layers, None where a schedule may choose it."""
    for flag in (LAYOUT, *ENDS, "--num-layers-per-virtual-pipeline-stage"):
        if value(args, flag) is not None:
            return flag
    return "--hybrid-layer-pattern" if "|" in (pattern(args) or "") else None


def stages_described(args: Namespace) -> int | None:
    """The number of stages that a layout, or a pattern with |, describes; None where neither does."""
    stages = layout(args)
    if stages is not None:
        return len(stages)
    segments = pattern(args)
    return segments.count("|") + 1 if segments and "|" in segments else None


def depths(args: Namespace) -> int:
    """The depths of multi-token prediction: those that a flag gives, or the patterns behind slashes."""
    given = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    return given.count("/") or value(args, "--mtp-num-layers") or 0


def predicting_stage(args: Namespace, stages: int) -> int | None:
    """The one of ``stages`` stages that has multi-token prediction, with a copy of the embedding; or None.

    It is the last unless a layout puts the m elsewhere.
    """
    if not depths(args):
        return None
    described = layout(args) or []
    return next((number for number, stage in enumerate(described) if "m" in stage), stages - 1)


def stages_for_prediction(placement: Placement) -> list[int]:
    """Return the stages where Megatron can build and train multi-token prediction.

    Megatron builds it in the last chunk of a rank (``MultiTokenPredictionBlock``).  On the first rank it sums
    the gradients of the first stage's embedding with other ranks' (``_allreduce_embedding_grad`` in
    ``megatron.core.distributed.finalize_model_grads``) and would leave out a copy in another of its stages.
    """
    stages = placement.stages
    return [
        stage
        for stage in range(stages - placement.ranks, stages)
        if placement.rank_of(stage) != 0 or stage in (0, stages - 1)
    ]


def can_predict(args: Namespace, placement: Placement) -> bool:
    """Whether ``args`` put multi-token prediction nowhere, or where Megatron can build and train it."""
    stage = predicting_stage(args, placement.stages)
    return stage is None or stage in stages_for_prediction(placement)


def are_heterogeneous(args: Namespace) -> bool:
    """Whether a file describes each layer of the model by itself."""
    flags = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
    return any(value(args, flag) for flag in flags)


def has_given_ends(args: Namespace) -> bool:
    """Whether a flag gives the first or the last pipeline rank a number of layers of its own."""
    return bool(_given_ends(args))


def by_stage(args: Namespace, stages: int) -> list[int]:
    """The number of layers of each of ``stages`` stages; ValueError where the layers do not fill them."""
    described = layout(args)
    if described is not None:
        return [stage.count("t") for stage in described]
    segments = pattern(args)
    if segments and "|" in segments:
        return [len(segment) for segment in segments.split("|")]
    if has_given_ends(args):
        ranks = args.pipeline_model_parallel_size
        by_rank, chunks = _by_rank(args), stages // ranks
        if any(layers % chunks for layers in by_rank):
            raise ValueError(
                f"ranks of {by_rank} layers cannot be cut into {chunks} chunks each; {_ends_fix(args)}"
            )
        return [by_rank[stage % ranks] // chunks for stage in range(stages)]
    return _evenly(args, stages)


def _evenly(args: Namespace, stages: int) -> list[int]:
    """The layers of each stage where no flag describes the stages."""
    each, left = divmod(spread(args), stages)
    if left:
        ends = spread(args) - count(args)
        below, above = each * stages - ends, (each + 1) * stages - ends
        nearest = f"{below} or {above}" if below > 0 else f"{above}"
        raise ValueError(
            f"--num-layers {count(args)} does not fill {stages} stages evenly; set it to {nearest}, or "
            f"describe uneven stages with {LAYOUT}{_in_place(args)}"
        )
    even = [each] * stages
    even[0] -= args.account_for_embedding_in_pipeline_split
    even[-1] -= args.account_for_loss_in_pipeline_split
    return even


def _by_rank(args: Namespace) -> list[int]:
    """The number of layers of each rank where the first or the last rank has a number of its own."""
    front, back = ([given] if (given := value(args, flag)) is not None else [] for flag in ENDS)
    others = args.pipeline_model_parallel_size - len(front) - len(back)
    left = count(args) - sum(front + back)
    if left < 0 or (left and others < 1):
        asked = " and ".join(f"{flag} {value(args, flag)}" for flag in _given_ends(args))
        why = "" if left < 0 else " and there is no other rank"
        raise ValueError(
            f"{asked} make {sum(front + back)} layers, but --num-layers is {count(args)}{why}; "
            f"{_ends_fix(args)}"
        )
    each, rest = divmod(left, max(others, 1))
    if rest:
        raise ValueError(f"{left} layers cannot be shared evenly by {others} other ranks; {_ends_fix(args)}")
    return [*front, *[each] * others, *back]


def _given_ends(args: Namespace) -> list[str]:
    """The flags that give the first or the last pipeline rank a number of layers of its own."""
    return [flag for flag in ENDS if value(args, flag) is not None]


def _ends_fix(args: Namespace) -> str:
    flags = " or ".join(_given_ends(args))
    return f"change {flags}, or describe the stages with {LAYOUT}{_in_place(args)}"


def _in_place(args: Namespace) -> str:
    """The flags of ``args`` that a layout takes the place of, in words."""
    given = [flag for flag in (*SPREAD, *_CHUNKS) if value(args, flag)]
    return f" in place of {' and '.join(given)}" if given else ""


def as_v(args: Namespace) -> str:
    """The layout of a V that cuts each rank's layers in two, with the smaller parts at the model's ends."""
    by_rank = _by_rank(args)
    halves = [part for layers in by_rank for part in (layers - layers // 2, layers // 2)]
    halves[0], halves[1] = halves[1], halves[0]
    return "E" + "|".join("t" * layers for layers in halves) + "L"


def cut_evenly(letters: str, stages: int) -> str:
    """A hybrid pattern with | between ``stages`` stages whose lengths differ by one at most."""
    edges = [len(letters) * stage // stages for stage in range(stages + 1)]
    return "|".join(letters[start:end] for start, end in pairwise(edges))
