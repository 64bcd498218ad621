"""The costs of a model's stages, estimated from Megatron's arguments before anything is built.

Schedules are compiled from costs.  Where --pipeline-costs gives none, they follow from the arithmetic of
the layers (``planner.step.costs_of_stages``).
"""

import copy
from argparse import Namespace

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_pp_ext.job import sizes
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.rules.asked import Asked
from megatron_pp_ext.planner.step.costs_of_stages import stage_costs
from megatron_pp_ext.planner.step.model_description import changed, settle
from megatron_pp_ext.schedule.costs import Costs


def estimate(args: Namespace, stages: int, shares_vocabulary: bool = False) -> Costs:
    """The costs of ``args``'s model cut into ``stages`` stages, as Megatron will cut it; hops are free.

    With ``shares_vocabulary`` every rank of the pipeline has a part of the embedding and the output layer.

    Raises ValueError where the arguments do not determine them, and for what the costs do not know.
    """
    args = changed(args)
    settle(args)
    all_rules.refuse_to_predict(Asked(args))
    if args.hidden_size is None or args.num_attention_heads is None:
        raise ValueError("cannot estimate a model whose sizes only a file gives: give --pipeline-costs")
    return stage_costs(args, stages, vocabulary(args), shares_vocabulary)


def vocabulary(args: Namespace) -> int:
    """The rows of the embedding; ValueError where neither a flag nor the tokenizer gives them."""
    sizes.require_vocabulary(args)
    known = args.padded_vocab_size or args.vocab_size
    try:
        return int(known or build_tokenizer(copy.copy(args)).vocab_size)
    except (AssertionError, ImportError, OSError) as error:  # a tokenizer's files or its library
        raise ValueError(
            f"cannot tell the size of the vocabulary: {error}; give --padded-vocab-size"
        ) from error
