"""The requirements of a schedule that is compiled from measured steps."""

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.job.rules.schedules import schedule


def has_room_for_another(job: RequestedJob) -> bool:
    """Whether a schedule compiled from measurements may take the place of the one that is requested."""
    can = job.pipeline.can
    return job.pipeline.has_schedule and can.flushes and not can.file


RULES = (
    Rules(
        title="What `--pipeline-profile-steps` needs",
        rows=(
            Rule(
                "--pipeline-profile-steps {pipeline_profile_steps}",
                "compiles a schedule to go on with, for which there is no room under {schedule}",
                "leave it out, or choose flex, auto or one of `mpp list`",
                when=lambda job: (
                    job.flags.pipeline_profile_steps is not None and not has_room_for_another(job)
                ),
                words=(schedule,),
            ),
        ),
    ),
)
