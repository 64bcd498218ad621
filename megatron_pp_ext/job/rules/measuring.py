"""What cannot go with measuring a run, and with rehearsing it."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.rules.rule import Rule, Rules

RULES = (
    Rules(
        title="With `--profile-pipeline`",
        when=lambda job: job.flags.profile_pipeline is not None,
        subject="--profile-pipeline",
        fix="leave it out",
        rows=(
            Rule("--pipeline-schedule: it measures layers under Megatron's own schedules"),
            Rule(
                "--recompute-granularity full: layers would run twice, and keep no activations to be measured"
            ),
            Rule("--mtp-num-layers: its layers are not in a profile"),
            Rule("--train-iters 1: the first step only warms up; set it to 2 or more"),
        ),
    ),
    Rules(
        title="In a rehearsal",
        when=lambda job: job.flags.rehearse_pipeline is not None,
        subject="--rehearse-pipeline",
        fix="leave it out",
        rows=(
            Rule(
                "--pipeline-schedule auto: it goes by the memory that all ranks have free; choose flex, and "
                "give it the limit"
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}: it never flushes; choose another schedule",
                lambda job: not job.pipeline.can.flushes,
            ),
            Rule("--pipeline-trace: a rank that runs alone has no step of all ranks"),
            Rule("--pipeline-profile-steps: ranks are measured together there"),
            Rule("--profile-pipeline: it measures under Megatron's own schedules"),
            Rule(
                "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}: its messages have two "
                "lengths; put the m next to the L",
                lambda job: layers.predicts_before_the_end(job),
            ),
        ),
    ),
    Rules(
        title="What a rehearsal needs",
        rows=(
            Rule(
                "--rehearse-pipeline: needs --fake-process-group; start it with mpp rehearse",
                lambda job: job.flags.rehearse_pipeline is not None and not job.flags.fake_process_group,
            ),
        ),
    ),
)
