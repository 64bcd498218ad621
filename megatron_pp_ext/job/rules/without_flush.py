"""What schedules that never flush cannot do with.

Under ``pipedream`` and ``pipedream-2bw`` a stage updates its weights as soon as its own backwards are done.
A feature that needs an answer from all stages before an update would empty the pipeline every time, which
these schedules exist to avoid.
"""

from megatron_pp_ext.job.rules.rule import Rule, Rules

_SCHEDULE = "--pipeline-schedule {pipeline_schedule}"
_CHANGES = "the microbatches of an update cannot change while some are in flight"
_SKIPS = "stages have read differently far, so that to skip a step would part samples from their labels"
_CAST = "its weights are cast once a step, and change within"

_NEVER = Rules(
    "Without a flush",
    lambda asked: not asked.can.flushes,
    beside=_SCHEDULE,
    rows=(
        Rule("--rampup-batch-size", _CHANGES),
        Rule("--step-batch-size-schedule", _CHANGES),
        Rule("--iterations-to-skip", _SKIPS),
        Rule("--result-rejected-tracker-filename", _SKIPS),
        Rule(
            "--overlap-param-gather",
            "weights that are still being gathered cannot be kept for what is in flight",
        ),
        Rule("--fp8-format", _CAST, asked=lambda asked: asked.fp8),
        Rule("--fp4-format", _CAST, asked=lambda asked: asked.fp4),
        Rule(
            "--te-precision-config-file", "its weights are cast for microbatch 0, which comes once in a run"
        ),
        Rule(
            "--moe-expert-rank-capacity-factor",
            "it reads a step's samples beforehand and runs the step again where they do not fit",
        ),
        Rule("--moe-router-enable-expert-bias", "the bias has no versions"),
        Rule(
            "--fine-grained-activation-offloading",
            "it gives its memory back at the end of a step, when some microbatches are in flight",
        ),
    ),
)

_SUMS = "it sums over a pipeline, and the ranks of a stage are in several of them"
_OF_REPLICAS = "the replicas of a stage would start a reduction at different places of the schedule"
_READS = "it shares out samples as if all stages had as many replicas"

# Megatron's groups are rectangular: every stage has as many data-parallel ranks as every other.  Replicated
# stages have groups of their own, and what needs the rectangle is refused.
_REPLICAS = Rules(
    "Beside `--pipeline-replicas`",
    lambda asked: asked.pipeline_replicas,
    beside="--pipeline-replicas",
    rows=(
        Rule("--pipeline-allow-waits", _SUMS, "leave it out"),
        Rule("--log-params-norm", _SUMS, "leave it out"),
        Rule("--num-experts", "the losses of routers are summed over a pipeline", "take a model without"),
        Rule(
            "--context-parallel-size",
            "a replica has tensor-parallel ranks alone",
            "set it to 1",
            lambda asked: asked.context_parallel_size > 1,
        ),
        Rule("--overlap-grad-reduce", _OF_REPLICAS, "leave it out"),
        Rule(
            "--use-distributed-optimizer",
            "its checkpoints, and the norm of its gradients, count as many replicas in all stages",
            "leave it out",
        ),
        Rule(
            "--optimizer dist_...",
            "it shares out layers as if all stages had as many replicas",
            "choose another one",
            lambda asked: str(asked.optimizer).startswith("dist_"),
        ),
        Rule(
            "--ddp-average-in-collective", "gradients are summed over the replicas of a stage", "leave it out"
        ),
        Rule("--data-parallel-random-init", "it counts as many replicas in all stages", "leave it out"),
        Rule("--create-all-gather-group", "its groups have as many replicas in all stages", "leave it out"),
        Rule("--use-tp-pp-dp-mapping", "ranks go by stage, then by replica", "leave it out"),
        Rule(
            "--dataloader-type cyclic",
            _READS,
            "choose single",
            lambda asked: asked.dataloader_type not in (None, "single"),
        ),
        Rule("--full-validation", _READS, "set --eval-iters"),
        Rule("--pipeline-trace", "a trace has one rank for each stage"),
        Rule(
            "--pipeline-model-parallel-layout auto",
            "auto chooses stages that take equally long, and those with replicas are to differ",
            "give the layout that mpp partition prints with them",
            lambda asked: asked.finds_layout,
        ),
    ),
)

_NESTEROV = Rules(
    "Beside `--pipeline-delay-correction nesterov`",
    lambda asked: asked.pipeline_delay_correction == "nesterov",
    beside="--pipeline-delay-correction nesterov",
    rows=(
        Rule(
            "--optimizer",
            "Nesterov's step is defined for the momentum of adam and sgd",
            "choose one of these, or --pipeline-delay-correction error-feedback",
            lambda asked: asked.optimizer not in ("adam", "sgd"),
        ),
        Rule(
            "--sgd-momentum 0",
            "without momentum there is nothing to look ahead by",
            "set it above 0, or choose --pipeline-delay-correction error-feedback",
            lambda asked: asked.optimizer == "sgd" and not asked.sgd_momentum,
        ),
        Rule("--use-precision-aware-optimizer", "its gradients and moments are not those of torch's Adam"),
        Rule("--optimizer-cpu-offload", "its parts step on two devices"),
        Rule("--optimizer-cuda-graph", "a captured step cannot be corrected"),
    ),
)

_WAITS = (
    Rule(
        "tied embeddings",
        "the first and the last stage would add up their gradients at every update",
        "add --untie-embeddings-and-output-weights",
        lambda asked: not asked.untie_embeddings_and_output_weights,
    ),
    Rule(
        "--mtp-num-layers",
        "the first and the last stage would add up the embedding's gradients at every update",
    ),
    Rule("--fp16", "its overflow check needs all stages before every update", "use --bf16"),
    Rule("--calculate-per-token-loss", "all stages would wait for the last one's count of tokens"),
    Rule("--exit-signal-handler", "all ranks would exchange signals after every update"),
    Rule("--exit-duration-in-mins", "all ranks would compare their clocks after every update"),
    Rule(
        "--timing-log-level",
        "its timers start with a barrier",
        "add --no-barrier-with-level-1-timing",
        lambda asked: asked.timing_log_level and asked.barrier_with_L1_time,
    ),
)

_WAITING = Rules(
    "Without a flush and without `--pipeline-allow-waits`",
    lambda asked: not asked.can.flushes and not asked.pipeline_allow_waits and not asked.pipeline_replicas,
    beside=_SCHEDULE,
    or_else=", or allow it with --pipeline-allow-waits",
    rows=_WAITS,
)

_WAITING_REPLICAS = Rules(
    "", lambda asked: not asked.can.flushes and asked.pipeline_replicas, beside=_SCHEDULE, rows=_WAITS
)

RULES = (_NEVER, _REPLICAS, _NESTEROV, _WAITING, _WAITING_REPLICAS)
