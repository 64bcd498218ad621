"""How Megatron's flags cut a model's layers into pipeline stages, read before anything is built.

Stages are counted in model order.  What is read here is what ``get_num_layers_to_build``
(``megatron.core.transformer.transformer_block``) and ``select_pipeline_segment``
(``megatron.core.models.hybrid.hybrid_layer_allocation``) will build.
"""

from argparse import Namespace
from itertools import pairwise

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_pp_ext.request.layers import count, evenly, pattern

ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


def layout(args: Namespace) -> list[list[LayerType]] | None:
    """The stages of --pipeline-model-parallel-layout, None without one."""
    if args.pipeline_model_parallel_layout is None:
        return None
    stages: list[list[LayerType]] = PipelineParallelLayerLayout.parse_str_to_list(
        args.pipeline_model_parallel_layout
    )
    return stages


def has_given_ends(args: Namespace) -> bool:
    """Whether the first or last pipeline rank was given a number of layers of its own."""
    return (
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
    )


def stages_asked_for(args: Namespace) -> int | None:
    """How many stages a layout or a pattern with | describes; None where neither does."""
    stages = layout(args)
    if stages is not None:
        return len(stages)
    segments = pattern(args)
    return segments.count("|") + 1 if segments and "|" in segments else None


def by_stage(args: Namespace, stages: int) -> list[int]:
    """How many layers each of ``stages`` stages has; ValueError where they do not fill them."""
    described = layout(args)
    if described is not None:
        return [part.count(LayerType.decoder) for part in described]
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
    return evenly(args, stages)


def _by_rank(args: Namespace) -> list[int]:
    """The layers of each rank where the first or the last has a number of its own."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    front, back = ([given] if given is not None else [] for given in (first, last))
    others = args.pipeline_model_parallel_size - len(front) - len(back)
    left = count(args) - sum(front + back)
    if left < 0 or (left % others if others else left):
        raise ValueError(f"{left} layers cannot be shared evenly by {others} other ranks; {_ends_fix(args)}")
    return [*front, *[left // others if others else 0] * others, *back]


def _ends_fix(args: Namespace) -> str:
    given = [flag for flag in ENDS if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]
    return f"change {' or '.join(given)}, or describe the stages with --pipeline-model-parallel-layout"


def as_v(args: Namespace) -> str:
    """The layout of a V that cuts each of the ranks' stages in two, the smaller part at the model's ends."""
    by_rank = _by_rank(args)
    halves = [part for layers in by_rank for part in (layers - layers // 2, layers // 2)]
    halves[0], halves[1] = halves[1], halves[0]
    return "E" + "|".join("t" * layers for layers in halves) + "L"


def cut_evenly(letters: str, stages: int) -> str:
    """A hybrid pattern with | between ``stages`` stages of as equal length as can be."""
    edges = [len(letters) * stage // stages for stage in range(stages + 1)]
    return "|".join(letters[start:end] for start, end in pairwise(edges))
