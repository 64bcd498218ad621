"""A schedule for slime, and its microbatches in a planned order: the function of --custom-megatron-init-path.

slime calls it in every process that trains, after the process groups were made and before the model is.  It
reads PIPELINE_SCHEDULE, PIPELINE_MICROBATCHES and, for flex, PIPELINE_MEMORY_LIMIT, and prints the schedule.

    python train.py --custom-megatron-init-path slime_hook.install ...
"""

import os

from slime.backends.megatron_utils import actor

import megatron_pp_ext
from megatron_pp_ext import Costs
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.plan import plan
from megatron_pp_ext.features.units.rates import LengthCosts


def install(args):
    """Install the schedule, and let slime read the microbatches of each step in an order planned for it."""
    ranks, limit = args.pipeline_model_parallel_size, os.environ.get("PIPELINE_MEMORY_LIMIT")
    schedule = megatron_pp_ext.install(
        os.environ["PIPELINE_SCHEDULE"],
        ranks=ranks,
        microbatches=int(os.environ["PIPELINE_MICROBATCHES"]),
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        memory_limit=float(limit) if limit else None,
    )
    print(schedule)
    if (
        args.use_dynamic_batch_size
    ):  # otherwise slime takes log-probabilities for being in the order of samples
        read = actor.get_data_iterator

        def read_in_order(rollout):
            order_microbatches(rollout, ranks)
            return read(rollout)

        actor.get_data_iterator = read_in_order


def order_microbatches(rollout, ranks):
    """Put the microbatches of each step into another order: slime finds their samples by number.

    It suits schedules whose microbatches go down the ranks once, or down and up: all but interleaved.
    """
    ordered, start, costs = [], 0, LengthCosts.with_attention(Costs.per_rank(ranks, 1), 1)
    for count in rollout["num_microbatches"]:
        step = rollout["micro_batch_indices"][start : start + count]
        lengths = [[rollout["total_lengths"][sample] for sample in samples] for samples in step]
        order = plan(lengths, named("1f1b", ranks, count), costs, how="rule").order
        ordered += [step[number] for number in order]
        start += count
    rollout["micro_batch_indices"] = ordered
