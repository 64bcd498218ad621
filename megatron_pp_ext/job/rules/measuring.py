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
            Rule("--pipeline-schedule", why="it measures layers under Megatron's own schedules"),
            Rule(
                "--recompute-granularity full",
                why="layers would run twice, and keep no activations to be measured",
            ),
            Rule("--mtp-num-layers", why="its layers are not in a profile"),
            Rule("--train-iters 1", why="the first step only warms up", fix="set it to 2 or more"),
        ),
    ),
    Rules(
        title="In a rehearsal",
        when=lambda job: job.flags.rehearse_pipeline is not None,
        subject="--rehearse-pipeline",
        fix="leave it out",
        rows=(
            Rule(
                "--pipeline-schedule auto",
                why="it goes by the memory that all ranks have free",
                fix="choose flex, and give it the limit",
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: not job.pipeline.can.flushes,
                why="it never flushes",
                fix="choose another schedule",
            ),
            Rule("--pipeline-trace", why="a rank that runs alone has no step of all ranks"),
            Rule("--pipeline-profile-steps", why="ranks are measured together there"),
            Rule("--profile-pipeline", why="it measures under Megatron's own schedules"),
            Rule(
                "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
                when=lambda job: layers.predicts_before_the_end(job.job),
                why="its messages have two lengths",
                fix="put the m next to the L",
            ),
        ),
    ),
    Rules(
        title="What a rehearsal needs",
        rows=(
            Rule(
                "--rehearse-pipeline",
                when=lambda job: job.flags.rehearse_pipeline is not None and not job.flags.fake_process_group,
                why="needs --fake-process-group",
                fix="start it with mpp rehearse",
            ),
        ),
    ),
)
