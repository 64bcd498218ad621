"""The requirements of forwards and backwards in pairs, and the flags that they do not support."""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule import catalog


def paired_schedules(job: RequestedJob) -> str:
    """Return the names of the schedules that can run forwards and backwards in pairs."""
    *names, last = (name for name, entry in catalog.ENTRIES.items() if entry.make_paired)
    return f"{', '.join(names)} or {last}"


RULES = (
    Rules(
        title="What pairs need",
        when=lambda job: job.pipeline.has_schedule,
        rows=(
            Rule(
                "--overlap-moe-expert-parallel-comm",
                "needs pairs, and --pipeline-schedule {pipeline_schedule} has none",
                "write (3F1;3B0)OVERLAP_F_B for two actions that run together, or leave the flag out",
                when=lambda job: (
                    job.parallel.overlap_moe_expert_parallel_comm
                    and job.from_file is not None
                    and not job.from_file.paired
                ),
            ),
            Rule(
                "--overlap-moe-expert-parallel-comm",
                "with --pipeline-schedule {pipeline_schedule} needs to know what a pair takes",
                'give --pipeline-costs a file with a "pair", the part of the sum of its two actions, or '
                "leave the flag out",
                when=lambda job: (
                    job.parallel.overlap_moe_expert_parallel_comm
                    and job.pipeline.can.takes_limit
                    and job.pipeline.pipeline_costs is None
                ),
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "has pairs (OVERLAP_F_B), which Megatron runs with --overlap-moe-expert-parallel-comm",
                "add it",
                when=lambda job: (
                    not job.parallel.overlap_moe_expert_parallel_comm
                    and job.from_file is not None
                    and job.from_file.paired
                ),
            ),
        ),
    ),
    Rules(
        title="In pairs under Megatron's own schedule",
        when=lambda job: job.parallel.overlap_moe_expert_parallel_comm and not job.pipeline.has_schedule,
        rows=(
            Rule(
                "--recompute-granularity full",
                "is not Megatron's in pairs: its plans of layers keep everything",
                "add --pipeline-schedule, or choose selective",
            ),
        ),
    ),
    Rules(
        title="With `--overlap-moe-expert-parallel-comm`",
        when=lambda job: job.parallel.overlap_moe_expert_parallel_comm and job.pipeline.has_schedule,
        subject="--overlap-moe-expert-parallel-comm",
        rows=(
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "its order has no pairs",
                "choose {paired_schedules}, or leave the flag out",
                when=lambda job: not job.pipeline.can.has_pairs,
                words=(paired_schedules,),
            ),
            # These are Megatron's own conditions (TransformerConfig), which it checks only when the model is
            # built.
            Rule(
                "--expert-model-parallel-size 1",
                "tokens then stay on their rank, and nothing is to be hidden",
                "set it to 2 or more",
            ),
            Rule(
                "--moe-token-dispatcher-type allgather",
                "it gathers the tokens of all ranks in one piece",
                "choose alltoall or flex",
            ),
            Rule(
                "training in full precision",
                "Megatron plans its layers in half precision alone",
                "add --bf16 or --fp16",
                when=lambda job: not job.precision.is_half,
            ),
            Rule(
                "--distribute-saved-activations",
                "the layers of a plan take their input as a whole",
                "leave it out",
                when=lambda job: job.memory.recomputes_layers and job.memory.distribute_saved_activations,
            ),
            Rule(
                "--fp8-recipe delayed",
                "layers that --recompute-granularity full runs again would count twice for its scales",
                "choose another recipe, or --recompute-granularity selective",
                when=lambda job: (
                    job.memory.recomputes_layers
                    and job.precision.fp8
                    and job.precision.fp8_recipe == "delayed"
                ),
            ),
            Rule(
                "--recompute-modules moe",
                "its tokens would have to leave twice",
                "choose others, such as core_attn",
            ),
            Rule("--moe-shared-expert-overlap", "a plan runs shared experts together with the attention"),
            Rule(
                "--mtp-num-layers above 1",
                "a plan knows one prediction",
                "set it to 1",
                when=lambda job: job.model.mtp_num_layers > 1,
            ),
            # This is what schedules cannot do with pairs.
            Rule("--pipeline-vocabulary", "its exchanges have no place within a pair"),
            Rule("--pipeline-profile-steps", "it measures forwards and backwards that run alone"),
        ),
    ),
)
