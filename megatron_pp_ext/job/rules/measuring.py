"""What cannot go with measuring a run, with rehearsing it and with planning it."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.rules.rule import Rule, Rules

_NEEDS = Rules(
    "What measurements need",
    lambda asked: True,
    rows=(
        Rule(
            "--pipeline-profile-steps {pipeline_profile_steps}",
            "compiles a schedule to go on with, for which there is no room under {schedule}",
            "leave it out, or choose flex, auto or one of `mpp list`",
            lambda asked: (
                asked.pipeline_profile_steps is not None
                and (not asked.has_schedule or not asked.can.flushes or asked.can.file)
            ),
        ),
        Rule(
            "--rehearse-pipeline",
            "needs --fake-process-group",
            "start it with mpp rehearse",
            lambda asked: asked.rehearse_pipeline is not None and not asked.fake_process_group,
        ),
    ),
)

_PROFILE = Rules(
    "Beside `--profile-pipeline`",
    lambda asked: asked.profile_pipeline is not None,
    beside="--profile-pipeline",
    rows=(
        Rule("--pipeline-schedule", "it measures layers under Megatron's own schedules", "leave it out"),
        Rule(
            "--recompute-granularity full",
            "layers would run twice, and keep no activations to be measured",
            "leave it out",
            lambda asked: asked.recompute_granularity == "full",
        ),
        Rule("--mtp-num-layers", "its layers are not in a profile", "leave it out"),
        Rule(
            "--train-iters 1",
            "the first step only warms up",
            "set it to 2 or more",
            lambda asked: asked.train_iters == 1,
        ),
    ),
)

_REHEARSAL = Rules(
    "In a rehearsal",
    lambda asked: asked.rehearse_pipeline is not None,
    beside="--rehearse-pipeline",
    rows=(
        Rule(
            "--pipeline-schedule auto",
            "it goes by the memory that all ranks have free",
            "choose flex, and give it the limit",
            lambda asked: asked.can.measures_memory,
        ),
        Rule(
            "--pipeline-schedule {pipeline_schedule}",
            "it never flushes",
            "choose another schedule",
            lambda asked: not asked.can.flushes,
        ),
        Rule("--pipeline-trace", "a rank that runs alone has no step of all ranks", "leave it out"),
        Rule("--pipeline-profile-steps", "ranks are measured together there", "leave it out"),
        Rule("--profile-pipeline", "it measures under Megatron's own schedules", "leave it out"),
        Rule(
            "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
            "its messages have two lengths",
            "put the m beside the L",
            lambda asked: (
                asked.has_layout and any("m" in stage for stage in (layers.layout(asked.args) or [])[:-1])
            ),
        ),
    ),
)

_LEAVE_OUT = "leave it out of the estimate"

NOT_COUNTED = Rules(
    "In `mpp estimate` and `mpp search`",
    lambda asked: True,
    beside="the planner",
    rows=(
        Rule("--multi-latent-attention", "its compressed keys are not modelled", _LEAVE_OUT),
        Rule("--yaml-cfg", "it reads flags alone", "give the model's sizes as flags"),
        Rule("--use-megatron-fsdp", "it shards weights in a way that is not modelled", _LEAVE_OUT),
    ),
)

_LAYER_SEEDS = Rules(
    "Beside `--pipeline-layer-seeds`",
    lambda asked: asked.pipeline_layer_seeds,
    beside="--pipeline-layer-seeds",
    rows=(Rule("--init-model-with-meta-device", "weights are drawn after the model is built there"),),
)

RULES = (_PROFILE, _REHEARSAL, _NEEDS, _LAYER_SEEDS)
