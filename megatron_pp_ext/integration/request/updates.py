"""Schedules that never flush: what their flags mean, and what would make all stages wait at an update.

A training step of Megatron is one update.  Under ``pipedream`` and ``pipedream-2bw`` each stage does
its updates as its own backwards come in; whatever asks all stages something before an update may
be done would empty the pipeline every time, which is what these schedules exist to avoid.
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron_pp_ext.integration.request.refusals import Refusal, is_set
from megatron_pp_ext.planner.step.programs import FLUSH_FREE, PIPEDREAM, TWO_VERSIONS
from megatron_pp_ext.request.plan import update_interval
from megatron_pp_ext.schedule.families.pipedream import Weights

NAMES = FLUSH_FREE


@dataclass(frozen=True, slots=True)
class Updates:
    """How a pipeline that never flushes updates its weights: every ``interval`` microbatches.

    With ``waits`` the stages may ask each other at every update, as stock does.
    """

    interval: int
    weights: Weights
    waits: bool


_WAITING = (
    Refusal(
        "tied embeddings",
        lambda args: not args.untie_embeddings_and_output_weights,
        "the first and the last stage would add up their gradients at every update",
        lambda args: "add --untie-embeddings-and-output-weights",
    ),
    Refusal(
        "--mtp-num-layers",
        is_set("mtp_num_layers"),
        "the first and the last stage would add up the embedding's gradients at every update",
    ),
    Refusal(
        "--fp16",
        is_set("fp16"),
        "its overflow check asks all stages before every update",
        lambda args: "use --bf16",
    ),
    Refusal(
        "--calculate-per-token-loss",
        is_set("calculate_per_token_loss"),
        "all stages would wait for the last one's count of tokens",
    ),
    Refusal(
        "--exit-signal-handler",
        is_set("exit_signal_handler"),
        "all ranks would ask each other for signals after every update",
    ),
    Refusal(
        "--exit-duration-in-mins",
        is_set("exit_duration_in_mins"),
        "all ranks would compare their clocks after every update",
    ),
    Refusal(
        "--timing-log-level",
        lambda args: args.timing_log_level and args.barrier_with_L1_time,
        "its timers start with a barrier",
        lambda args: "add --no-barrier-with-level-1-timing",
    ),
)

_SKIPS = "stages have read differently far, so that to skip a step would part samples from their labels"

_NEVER = (
    Refusal(
        "--rampup-batch-size",
        is_set("rampup_batch_size"),
        "the microbatches of an update cannot change while some are in flight",
    ),
    Refusal(
        "--step-batch-size-schedule",
        is_set("step_batch_size_schedule"),
        "the microbatches of an update cannot change while some are in flight",
    ),
    Refusal("--iterations-to-skip", is_set("iterations_to_skip"), _SKIPS),
    Refusal("--result-rejected-tracker-filename", is_set("result_rejected_tracker_filename"), _SKIPS),
    Refusal(
        "--overlap-param-gather",
        is_set("overlap_param_gather"),
        "weights that are still being gathered cannot be kept for what is in flight",
    ),
    Refusal("--fp8-format", is_set("fp8"), "its weights are cast once a step, and change within"),
    Refusal("--fp4-format", is_set("fp4"), "its weights are cast once a step, and change within"),
    Refusal(
        "--te-precision-config-file",
        is_set("te_precision_config_file"),
        "its weights are cast for microbatch 0, which comes once in a run",
    ),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        is_set("moe_expert_rank_capacity_factor"),
        "it reads a step's samples beforehand and runs the step again where they do not fit",
    ),
    Refusal(
        "--moe-router-enable-expert-bias",
        is_set("moe_router_enable_expert_bias"),
        "the bias has no versions",
    ),
)


def read(args: Namespace, microbatches: int) -> Updates:
    """What ``args`` ask for; ValueError if it cannot be.

    ``microbatches`` are those of a global batch, which is what Megatron's optimizer, learning rate
    and logs take for an update.  Turns off the rerun state machine, which asks all ranks every step.
    """
    name, ranks, asked = (
        args.pipeline_schedule,
        args.pipeline_model_parallel_size,
        args.pipeline_update_interval,
    )
    interval = update_interval(name, ranks, asked, microbatches)
    for refusal in (*_NEVER, *(() if args.pipeline_allow_waits else _WAITING)):
        if refusal.is_set(args):
            may_wait = "" if refusal in _NEVER else ", or allow it with --pipeline-allow-waits"
            raise ValueError(
                f"--pipeline-schedule {name} does not support {refusal.flag}: {refusal.reason}; "
                f"{refusal.fix(args)}{may_wait}"
            )
    if name == TWO_VERSIONS:
        weights = Weights.PREVIOUS
    else:
        weights = Weights.SAME if args.pipeline_vertical_sync else Weights.LATEST
    args.rerun_mode = "disabled"
    return Updates(interval, weights, args.pipeline_allow_waits)


def refuse_flags(args: Namespace) -> None:
    """Raise ValueError for a flag that only a schedule that never flushes understands."""
    for flag, value in (
        ("--pipeline-update-interval", args.pipeline_update_interval),
        ("--pipeline-vertical-sync", args.pipeline_vertical_sync),
        ("--pipeline-allow-waits", args.pipeline_allow_waits),
    ):
        if value:
            raise ValueError(
                f"{flag} has no meaning for --pipeline-schedule {args.pipeline_schedule}; leave it out, or "
                f"choose {PIPEDREAM}"
            )
