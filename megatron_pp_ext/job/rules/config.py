"""What no schedule of this package supports among settings without a flag, in the model's config."""

from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.job.rules.schedules import has_graphs

RULES = (
    Rules(
        title="In the model's config",
        subject="a schedule of megatron_pp_ext",
        rows=(
            Rule(
                "num_microbatches_with_partial_activation_checkpoints in the model's config",
                why="it counts microbatches in stock's order",
                fix="leave it out",
            ),
            Rule(
                "cuda_graph_impl in the model's config",
                when=has_graphs,
                why="graphs are captured in stock's order of microbatches",
                fix="leave it out",
            ),
        ),
    ),
)
