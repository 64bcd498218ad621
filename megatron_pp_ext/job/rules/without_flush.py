"""What schedules that never flush do not support.

Under pipedream and pipedream-2bw a stage updates its weights as soon as its own backwards are done.  A
feature that needs an answer from all stages before an update would empty the pipeline every time, which these
schedules exist to avoid.
"""

from megatron_pp_ext.job.rules.rule import Rule, Rules

WAITS = Rules(
    title="Without a flush and without `--pipeline-allow-waits`",
    when=lambda job: (
        not job.pipeline.can.flushes
        and not job.pipeline.pipeline_allow_waits
        and not job.pipeline.pipeline_replicas
    ),
    subject="--pipeline-schedule {pipeline_schedule}",
    or_else=", or allow it with --pipeline-allow-waits",
    rows=(
        Rule(
            "tied embeddings",
            "the first and the last stage would add up their gradients at every update",
            "add --untie-embeddings-and-output-weights",
            when=lambda job: not job.model.untie_embeddings_and_output_weights,
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
            when=lambda job: job.flags.timing_log_level and job.flags.barrier_with_L1_time,
        ),
    ),
)

RULES = (
    Rules(
        title="Without a flush",
        when=lambda job: not job.pipeline.can.flushes,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule(
                "--rampup-batch-size", "the microbatches of an update cannot change while some are in flight"
            ),
            Rule(
                "--step-batch-size-schedule",
                "the microbatches of an update cannot change while some are in flight",
            ),
            Rule(
                "--iterations-to-skip",
                "stages have read differently far, so that to skip a step would part samples from their "
                "labels",
            ),
            Rule(
                "--result-rejected-tracker-filename",
                "stages have read differently far, so that to skip a step would part samples from their "
                "labels",
            ),
            Rule(
                "--overlap-param-gather",
                "weights that are still being gathered cannot be kept for what is in flight",
            ),
            Rule(
                "--fp8-format",
                "its weights are cast once a step, and change within",
                when=lambda job: job.precision.fp8,
            ),
            Rule(
                "--fp4-format",
                "its weights are cast once a step, and change within",
                when=lambda job: job.precision.fp4,
            ),
            Rule(
                "--te-precision-config-file",
                "its weights are cast for microbatch 0, which comes once in a run",
            ),
            Rule(
                "--moe-expert-rank-capacity-factor",
                "it reads a step's samples beforehand and runs the step again where they do not fit",
            ),
            Rule("--moe-router-enable-expert-bias", "the bias has no versions"),
            Rule(
                "--num-distributed-optimizer-instances {num_distributed_optimizer_instances}",
                "no training without a flush was compared with several instances",
                when=lambda job: job.memory.num_distributed_optimizer_instances > 1,
            ),
            Rule(
                "--fine-grained-activation-offloading",
                "it gives its memory back at the end of a step, when some microbatches are in flight",
            ),
        ),
    ),
    # Megatron's groups are rectangular: every stage has as many data-parallel ranks as every other.
    # Replicated stages have groups of their own, and what needs the rectangle is refused.
    Rules(
        title="With `--pipeline-replicas`",
        when=lambda job: job.pipeline.pipeline_replicas,
        subject="--pipeline-replicas",
        fix="leave it out",
        rows=(
            Rule(
                "--pipeline-allow-waits",
                "it sums over a pipeline, and the ranks of a stage are in several of them",
            ),
            Rule(
                "--log-params-norm",
                "it sums over a pipeline, and the ranks of a stage are in several of them",
            ),
            Rule("--num-experts", "the losses of routers are summed over a pipeline", "take a model without"),
            Rule(
                "--context-parallel-size",
                "a replica has tensor-parallel ranks alone",
                "set it to 1",
                when=lambda job: job.parallel.context_parallel_size > 1,
            ),
            Rule(
                "--overlap-grad-reduce",
                "the replicas of a stage would start a reduction at different places of the schedule",
            ),
            Rule(
                "--use-distributed-optimizer",
                "its checkpoints, and the norm of its gradients, count as many replicas in all stages",
            ),
            Rule(
                "--optimizer dist_...",
                "it shares out layers as if all stages had as many replicas",
                "choose another one",
                when=lambda job: job.memory.optimizer.startswith("dist_"),
            ),
            Rule("--ddp-average-in-collective", "gradients are summed over the replicas of a stage"),
            Rule("--data-parallel-random-init", "it counts as many replicas in all stages"),
            Rule("--create-all-gather-group", "its groups have as many replicas in all stages"),
            Rule("--use-tp-pp-dp-mapping", "ranks go by stage, then by replica"),
            Rule(
                "--dataloader-type cyclic",
                "it shares out samples as if all stages had as many replicas",
                "choose single",
                when=lambda job: job.flags.dataloader_type and job.flags.dataloader_type != "single",
            ),
            Rule(
                "--full-validation",
                "it shares out samples as if all stages had as many replicas",
                "set --eval-iters",
            ),
            Rule("--pipeline-trace", "a trace has one rank for each stage", "leave one of the two out"),
            Rule(
                "--pipeline-model-parallel-layout auto",
                "auto chooses stages that take equally long, and those with replicas are to differ",
                "give the layout that mpp partition prints with them",
            ),
        ),
    ),
    WAITS,
    Rules(
        title="",
        when=lambda job: not job.pipeline.can.flushes and job.pipeline.pipeline_replicas,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=WAITS.rows,
    ),
)
