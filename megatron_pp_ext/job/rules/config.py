"""What no schedule of this package supports among settings without a flag, in the model's config."""

from megatron_pp_ext.job.rules.rule import Rule, Rules

RULES = (
    Rules(
        title="In the model's config",
        subject="a schedule of megatron_pp_ext",
        rows=(
            Rule(
                "num_microbatches_with_partial_activation_checkpoints in the model's config",
                "it counts microbatches in stock's order",
                "leave it out",
                when=lambda job: job.is_set("num_microbatches_with_partial_activation_checkpoints"),
            ),
            Rule(
                "dynamic_context_parallel in the model's config",
                "the context-parallel groups of each microbatch join other pipelines",
                "leave it out",
                when=lambda job: job.is_set("dynamic_context_parallel"),
            ),
            Rule(
                "delay_wgrad_compute in the model's config",
                "layers would leave weight gradients where no schedule looks for them",
                "leave it out",
                when=lambda job: job.flags.delay_wgrad_compute,
            ),
        ),
    ),
)
