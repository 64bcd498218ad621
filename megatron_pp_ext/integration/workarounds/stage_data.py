"""Data for the stages between the first and the last.

Scripts of Megatron read a batch on the first and the last stage, and give the others none. But attention
within documents needs the documents' ends on every stage: without them, a stage between the two attends to
all earlier tokens. Each stage then reads its own copy of the batch, as the outer ones do.
"""

from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from megatron_pp_ext.around import bound
from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

WORKAROUND = Workaround(
    "attention within documents on every stage and every tensor-parallel rank",
    EVERY,
    "tests/integration/test_short_documents.py::test_a_mask_for_the_ranks_between_the_ends",
)

FLAGS = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
"""The arguments that keep attention within documents; some releases lack the second."""


def every_stage_reads() -> bool:
    """Whether the flags of this job keep attention within documents."""
    args = get_args()
    return any(getattr(args, name, False) for name in FLAGS)


@hook("megatron.training.utils:is_first_or_last_pipeline_stage", "vp_stage", WORKAROUND.defect)
def read_on_every_stage(stock: Callable[[int | None], bool], vp_stage: int | None) -> bool:
    """Count every stage as one that reads batches where each of them needs its own.

    By this scripts decide on which ranks to build a dataset and for which stages to take a batch from it.
    """
    return every_stage_reads() or stock(vp_stage)


_WHOLE_BATCH = (
    "is_hybrid_cp create_attention_mask_in_dataloader broadcast_src_rank broadcast_group cp_size tp_rank "
    "micro_batch_size seq_length mtp_on_this_rank pipeline_model_parallel_size is_pipeline_first_stage "
    "is_pipeline_last_stage"
)


@hook(
    "megatron.core.utils:get_batch_on_this_tp_rank",
    (f"batch is_sft {_WHOLE_BATCH}", f"batch has_cu_seqlens {_WHOLE_BATCH}"),
    WORKAROUND.defect,
    before={"megatron.training.utils:get_batch_on_this_tp_rank": "data_iterator mtp_on_this_rank"},
)
def send_whole_batch(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send the whole batch to all tensor-parallel ranks where every stage needs it.

    Stock sends nothing, or only a part, to the other ranks of a stage between them, unless it predicts
    several tokens, for which all fields are sent.
    """
    call = bound(stock, *args, **kwargs)
    if every_stage_reads():
        call.arguments["mtp_on_this_rank"] = True
    return stock(*call.args, **call.kwargs)
