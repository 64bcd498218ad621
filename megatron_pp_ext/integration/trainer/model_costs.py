"""The costs of a model's stages, estimated from Megatron's arguments before anything is built.

Schedules are compiled from costs.  Where --pipeline-costs gives none, they follow from the arithmetic of
the layers (``costs.costs_of_stages``).
"""

import copy

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_pp_ext.costs.costs_of_stages import stage_costs
from megatron_pp_ext.job import sizes
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.schedule.costs import Costs


def estimate(asked: RequestedJob, stages: int, splits_head: bool = False) -> Costs:
    """The costs of the ``asked`` model in ``stages`` stages as Megatron cuts it; messages take no time.

    With ``splits_head`` every rank of the pipeline has a part of the embedding and the output layer.

    Raises ValueError where the flags do not determine them, and for layers whose costs are not known.
    """
    all_rules.refuse_to_predict(asked)
    job = asked.job
    if not (job.model.hidden_size and job.model.num_attention_heads):
        raise ValueError("cannot estimate a model whose sizes only a file gives: give --pipeline-costs")
    return stage_costs(job, stages, vocabulary(asked), splits_head)


def vocabulary(asked: RequestedJob) -> int:
    """The rows of the embedding; ValueError where neither a flag nor the tokenizer gives them."""
    sizes.require_vocabulary(asked)
    rows = asked.argument("padded_vocab_size") or asked.argument("vocab_size")  # Megatron may set them later
    try:
        return int(rows or build_tokenizer(copy.copy(asked.args)).vocab_size)
    except (AssertionError, ImportError, OSError) as error:  # a tokenizer's files or its library
        raise ValueError(
            f"cannot tell the size of the vocabulary: {error}; give --padded-vocab-size"
        ) from error
