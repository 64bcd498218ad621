"""What Megatron refuses when it starts, and what it then computes otherwise than its flags say.

Training leaves these to Megatron, whose releases differ in them.  What is planned is refused here, since its
command could not run.
"""

from megatron_pp_ext.job.rules import start_experts, start_model, start_stages, start_step
from megatron_pp_ext.job.rules.rule import Rule, Rules

RULES = (
    Rules(
        title="In `mpp estimate` and `mpp search`, as Megatron does at its start",
        rows=(*start_model.ROWS, *start_experts.ROWS, *start_step.ROWS, *start_stages.ROWS),
    ),
    # What Megatron starts and then computes otherwise than the flags say, or cannot compute.
    Rules(
        title="In `mpp estimate` and `mpp search`, about the precision",
        rows=(
            Rule(
                "--fp8-format",
                "with weights in fp32 is not modelled",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: job.precision.fp8 and not job.precision.is_half,
            ),
            Rule(
                "--fp8-format",
                "has no effect on --transformer-impl local, whose products are not in FP8",
                "leave one of the two out",
                when=lambda job: job.precision.fp8 and job.precision.transformer_impl == "local",
            ),
            Rule(
                "--attention-backend {attention_backend}",
                "has no kernel for fp32",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: (
                    job.precision.attention_backend in ("flash", "fused") and not job.precision.is_half
                ),
            ),
        ),
    ),
)
