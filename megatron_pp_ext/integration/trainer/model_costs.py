"""The costs of a model's stages, estimated from Megatron's arguments before anything is built.

Schedules are compiled from costs.  Where --pipeline-costs gives none, they follow from the arithmetic of
the layers (``costs.costs_of_stages``).
"""

import copy

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_pp_ext.costs import costs_of_stages
from megatron_pp_ext.job import sizes, stage_costs
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.placement import Placement


def costs_of(job: RequestedJob) -> CostModel:
    """Return the costs of the stages of ``job``: those of --pipeline-costs, else the estimate."""
    if job.pipeline.pipeline_costs is None:
        return estimate(job)
    return CostModel(
        lambda placement: stage_costs.cut(stage_costs.read(job), job, placement.stages, placement.splits_head)
    )


def estimate(job: RequestedJob) -> CostModel:
    """Return the costs of the stages of ``job`` as Megatron cuts it; messages take no time.

    The model raises ValueError where the flags do not determine them, and for what the costs do not know.
    """
    return costs_of_stages.cost_model(job, _estimate)


def _estimate(job: RequestedJob, placement: Placement) -> Costs:
    all_rules.refuse_to_predict(job)
    if not (job.model.hidden_size and job.model.num_attention_heads):
        raise ValueError("cannot estimate a model whose sizes only a file gives: give --pipeline-costs")
    return costs_of_stages.stage_costs(job, placement, vocabulary(job))


def vocabulary(job: RequestedJob) -> int:
    """The rows of the embedding; ValueError where neither a flag nor the tokenizer gives them."""
    sizes.require_vocabulary(job)
    known = job.model.padded_vocab_size or job.model.vocab_size
    try:
        return int(known or build_tokenizer(copy.copy(job.args)).vocab_size)
    except (AssertionError, ImportError, OSError) as error:  # a tokenizer's files or its library
        raise ValueError(
            f"cannot tell the size of the vocabulary: {error}; give --padded-vocab-size"
        ) from error
