"""A layout of layers over stages as text, and in the other forms that a config of Megatron takes."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from megatron_pp_ext.job.flag_table import MOST_LAYERS

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
