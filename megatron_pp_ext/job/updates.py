"""The flags of schedules that never flush, and those that would make all stages wait at every update.

A training step of Megatron is one update.  Under ``pipedream`` and ``pipedream-2bw`` each stage updates
its weights as soon as its own backwards are done.  A feature that needs an answer from all stages before
an update would empty the pipeline every time, which these schedules exist to avoid.
"""

from argparse import Namespace
from dataclasses import dataclass
from enum import StrEnum

from megatron_pp_ext.job import replicas
from megatron_pp_ext.job.refusals import Refusal, refuse_first
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.families.pipedream import Weights, most_versions
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.names import PIPEDREAM


class DelayCorrection(StrEnum):
    """What is done about gradients of weights that have changed meanwhile."""

    ERROR_FEEDBACK = "error-feedback"
    """Microbatches compute with weights that are ahead by the delay (``runtime.look_ahead``)."""
    NESTEROV = "nesterov"
    """The optimizer's momentum is Nesterov's, by which the weights are ahead themselves: arXiv 2505.01099."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of a pipeline that never flushes, one every ``interval`` microbatches.

    ``replicas`` are those of its stages.  With ``waits`` the stages may wait for each other at every update,
    as under Megatron's own schedules.
    """

    interval: int
    weights: Weights
    waits: bool
    replicas: Replicas
    correction: DelayCorrection | None = None

    def delay(self, stage: int) -> int:
        """Return how many updates late the gradients of ``stage`` come at most, once the pipeline is full."""
        return most_versions(self.weights, stage, self.replicas, self.interval)

    def copies(self, stage: int) -> int:
        """Return how many copies of its weights ``stage`` keeps beside the optimizer's own."""
        delay = self.delay(stage)
        return delay + 1 if delay and self.correction is DelayCorrection.ERROR_FEEDBACK else delay


_WAITING = (
    Refusal(
        "tied embeddings",
        "the first and the last stage would add up their gradients at every update",
        "add --untie-embeddings-and-output-weights",
        lambda args: not args.untie_embeddings_and_output_weights,
    ),
    Refusal(
        "--mtp-num-layers",
        "the first and the last stage would add up the embedding's gradients at every update",
    ),
    Refusal("--fp16", "its overflow check needs all stages before every update", "use --bf16"),
    Refusal("--calculate-per-token-loss", "all stages would wait for the last one's count of tokens"),
    Refusal("--exit-signal-handler", "all ranks would exchange signals after every update"),
    Refusal("--exit-duration-in-mins", "all ranks would compare their clocks after every update"),
    Refusal(
        "--timing-log-level",
        "its timers start with a barrier",
        "add --no-barrier-with-level-1-timing",
        lambda args: getattr(args, "timing_log_level", 0) and args.barrier_with_L1_time,
    ),
)

_CHANGES = "the microbatches of an update cannot change while some are in flight"
_SKIPS = "stages have read differently far, so that to skip a step would part samples from their labels"
_CAST = "its weights are cast once a step, and change within"

_NESTEROV = (
    Refusal(
        "--optimizer",
        "Nesterov's step is defined for the momentum of adam and sgd",
        "choose one of these, or --pipeline-delay-correction error-feedback",
        lambda args: args.optimizer not in ("adam", "sgd"),
    ),
    Refusal(
        "--sgd-momentum 0",
        "without momentum there is nothing to look ahead by",
        "set it above 0, or choose --pipeline-delay-correction error-feedback",
        lambda args: args.optimizer == "sgd" and not args.sgd_momentum,
    ),
    Refusal("--use-precision-aware-optimizer", "its gradients and moments are not those of torch's Adam"),
    Refusal("--optimizer-cpu-offload", "its parts step on two devices"),
    Refusal("--optimizer-cuda-graph", "a captured step cannot be corrected"),
)

_NEVER = (
    Refusal("--rampup-batch-size", _CHANGES),
    Refusal("--step-batch-size-schedule", _CHANGES),
    Refusal("--iterations-to-skip", _SKIPS),
    Refusal("--result-rejected-tracker-filename", _SKIPS),
    Refusal(
        "--overlap-param-gather", "weights that are still being gathered cannot be kept for what is in flight"
    ),
    Refusal("--fp8-format", _CAST, test=lambda args: getattr(args, "fp8", None)),
    Refusal("--fp4-format", _CAST, test=lambda args: getattr(args, "fp4", None)),
    Refusal("--te-precision-config-file", "its weights are cast for microbatch 0, which comes once in a run"),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        "it reads a step's samples beforehand and runs the step again where they do not fit",
    ),
    Refusal("--moe-router-enable-expert-bias", "the bias has no versions"),
)


def read(args: Namespace, microbatches: int) -> Updates:
    """The updates that ``args`` request; ValueError where the schedule cannot have them.

    ``microbatches`` are those of a global batch, on which Megatron's optimizer, learning rate and logs base
    an update.
    """
    name = args.pipeline_schedule
    replicated, stages = replicas.requested(args), replicas.of_stages(args)
    interval = _interval(name, stages, args.pipeline_update_interval, microbatches)
    refuse_first(args, _NEVER)
    if replicated:
        replicas.refuse(args, replicated, microbatches)
    correction = args.pipeline_delay_correction
    if correction == DelayCorrection.NESTEROV:
        refuse_first(args, _NESTEROV, by=f"--pipeline-delay-correction {correction}")
    if not args.pipeline_allow_waits:
        allowed = "" if replicated else ", or allow it with --pipeline-allow-waits"
        refuse_first(args, _WAITING, allowed)
    return described(args, name, interval, stages)


def described(args: Namespace, name: str, interval: int, stages: Replicas) -> Updates:
    """Return the updates of the schedule ``name`` as the other flags in ``args`` have them, unchecked."""
    if catalog.abilities(name).has_two_versions:
        weights = Weights.PREVIOUS
    else:
        weights = Weights.SAME if args.pipeline_vertical_sync else Weights.LATEST
    named = args.pipeline_delay_correction
    correction = DelayCorrection(named) if named else None
    return Updates(interval, weights, args.pipeline_allow_waits, stages, correction)


def _interval(name: str, stages: Replicas, requested: int | None, microbatches: int) -> int:
    """The microbatches between two updates; ``requested`` is --pipeline-update-interval.

    ValueError unless they are the ``microbatches`` of a global batch, and enough for the schedule.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"--pipeline-update-interval is {requested}, but must be 1 or more")
    has_two_versions = catalog.abilities(name).has_two_versions
    interval = requested or (microbatches if has_two_versions else stages.full_round)
    if interval != microbatches:
        raise ValueError(
            f"--pipeline-schedule {name} updates every {interval} microbatch(es), but --global-batch-size "
            f"makes {microbatches} a step; set it to {interval} x micro-batch size x data-parallel size, or "
            f"--pipeline-update-interval to {microbatches}"
        )
    if has_two_versions and interval < stages.ranks:
        raise ValueError(
            f"--pipeline-schedule {name} needs as many microbatches an update as it has pipeline ranks, "
            f"{stages.ranks}, but got {interval}; raise --global-batch-size, or choose {PIPEDREAM}"
        )
    return interval


def refuse_flags(args: Namespace) -> None:
    """Raise ValueError for a flag that has a meaning only for a schedule that never flushes."""
    for flag, value in (
        ("--pipeline-update-interval", args.pipeline_update_interval),
        ("--pipeline-vertical-sync", args.pipeline_vertical_sync),
        ("--pipeline-allow-waits", args.pipeline_allow_waits),
        ("--pipeline-delay-correction", args.pipeline_delay_correction),
    ):
        if value:
            raise ValueError(
                f"{flag} has no meaning for --pipeline-schedule {args.pipeline_schedule}; leave it out, or "
                f"choose {PIPEDREAM}"
            )
