"""What cannot go with measuring a run, with rehearsing it and with planning it."""

from collections.abc import Iterator
from functools import cache, partial

from megatron_pp_ext.job import flag_effects, layers, stage_costs
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
                asked.has_layout and any("m" in stage for stage in (layers.layout(asked.job) or ())[:-1])
            ),
        ),
    ),
)

_LEAVE_OUT = "leave it out of the estimate"

_MEASURE = "measure the stages with mpp rehearse --costs FILE and give --pipeline-costs FILE"


def _unknown_to_costs(what: str, fix: str) -> Iterator[Rule]:
    """Yield a rule for each argument, and for values of others, that the costs of ``what`` do not know."""
    for name, reason in flag_effects.refused(what).items():
        value = f" {{{name}}}" if flag_effects.takes_value(name) else ""
        is_asked = partial(lambda name, asked: flag_effects.is_asked(asked, name), name)
        yield Rule(f"{flag_effects.flag(name)}{value}", reason, fix, is_asked)
    for name, values in flag_effects.table()["values"][what].items():
        is_other = partial(lambda name, known, asked: asked[name] not in (None, *known), name, values)
        reason = f"only {', '.join(values[:-1])} and {values[-1]} are modelled"
        yield Rule(f"{flag_effects.flag(name)} {{{name}}}", reason, fix, is_other)


@cache
def not_counted() -> tuple[Rules, ...]:
    """Return the rules about what an estimate would be wrong for.

    They read two tables, which commands that estimate nothing need not wait for.
    """
    unless_measured = Rules(
        "In `mpp estimate` and `mpp search`, unless the stages are measured",
        lambda asked: asked.pipeline_costs is None,
        beside="the planner",
        rows=tuple(_unknown_to_costs("stages", f"{_LEAVE_OUT}, or {_MEASURE}")),
    )
    measured = Rules(
        "",
        lambda asked: stage_costs.lacks_parameters(asked.job),
        beside="the planner",
        rows=tuple(
            _unknown_to_costs(
                "stages",
                'add "parameters" to every one of the "stages" in {pipeline_costs}, as mpp rehearse --costs '
                "does",
            )
        ),
    )
    always = Rules(
        "In `mpp estimate` and `mpp search`",
        lambda asked: True,
        beside="the planner",
        rows=tuple(_unknown_to_costs("step", _LEAVE_OUT)),
    )
    return unless_measured, measured, always


@cache
def not_compiled() -> Rules:
    """Return the rules about what training's own costs of stages would be wrong for."""
    return Rules(
        "Where training predicts its stages: `flex`, `auto`, and `auto` for a layout or the vocabulary",
        lambda asked: asked.pipeline_costs is None,
        beside="a prediction from the model's sizes",
        rows=tuple(_unknown_to_costs("stages", f"{_MEASURE}, or leave flex and every auto out")),
    )


_LAYER_SEEDS = Rules(
    "Beside `--pipeline-layer-seeds`",
    lambda asked: asked.pipeline_layer_seeds,
    beside="--pipeline-layer-seeds",
    rows=(Rule("--init-model-with-meta-device", "weights are drawn after the model is built there"),),
)

RULES = (_PROFILE, _REHEARSAL, _NEEDS, _LAYER_SEEDS)
