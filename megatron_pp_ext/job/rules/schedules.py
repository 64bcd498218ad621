"""What a schedule of this package does not support."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import ENGINE, RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.schedule.placement import FIRST


def schedule(job: RequestedJob) -> str:
    """Return what schedules the job, in words."""
    name = job.pipeline.pipeline_schedule
    return "Megatron's own schedules" if name is None else f"--pipeline-schedule {name}"


def has_graphs(job: RequestedJob, kind: str | None = None) -> bool:
    """Whether CUDA graphs are captured, or those of a ``kind``."""
    found = job.precision.cuda_graph_impl
    return found != "none" if kind is None else found == kind


def changes_its_order(job: RequestedJob) -> bool:
    """Whether another order takes the place of the first one while the job runs."""
    return job.pipeline.can.measures_memory or job.flags.pipeline_profile_steps is not None


def predicting_stage(job: RequestedJob) -> int | None:
    """Return the stage with multi-token prediction."""
    return layers.predicting_stage(job.job, job.placement.stages) if job.placement else None


def stages_for_prediction(job: RequestedJob) -> str:
    """Return the stages that may have it, in words."""
    assert job.placement is not None
    return " or ".join(map(str, layers.stages_for_prediction(job.placement)))


def can_predict(job: RequestedJob) -> bool:
    """Whether multi-token prediction is where Megatron can train it, as far as the placement is known."""
    return job.placement is None or layers.can_predict(job.job, job.placement)


def engine(job: RequestedJob) -> str:
    """Return the version of Transformer Engine on the machine that trains."""
    return job.releases.get(ENGINE, "")


def gathers_weights(job: RequestedJob) -> bool:
    """Whether weights are cut into more parts than tensor-parallel ranks, and gathered for each use."""
    return (job.flags.tensor_parallel_num_weight_shards or 0) > job.parallel.tensor_model_parallel_size


def gathers_experts(job: RequestedJob) -> bool:
    """Whether the same is done to the weights of experts."""
    return (job.flags.expert_tensor_parallel_num_weight_shards or 0) > job.parallel.expert_tensor


def is_v(job: RequestedJob) -> bool:
    """Whether both ends of the model are on one rank."""
    return job.placement is not None and job.placement.turns_round


def has_loss_elsewhere(job: RequestedJob) -> bool:
    """Whether the loss is asked for on the first rank, where the placement, as far as known, has none."""
    if job.placement is None or not job.pipeline.has_schedule or job.pipeline.can.is_compiled:
        return False
    return job.pipeline.pipeline_loss_rank == FIRST and not job.placement.folds


def layout_of_v(job: RequestedJob) -> str:
    """Return the layout that says of a V what other flags say of the ends of a model."""
    return layers.as_v(job.job)


WITHOUT_PIPELINE = Rules(
    title="Without a pipeline",
    when=lambda job: job.parallel.pipeline_model_parallel_size <= 1,
    why=(
        "needs a pipeline of 2 ranks or more, got --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size}"
    ),
    fix="set it to 2 or more, or leave the flag out",
    rows=(
        Rule("--pipeline-vocabulary {pipeline_vocabulary}"),
        Rule("--pipeline-model-parallel-layout auto"),
        Rule("--pipeline-schedule {pipeline_schedule}"),
        Rule("--pipeline-trace"),
    ),
)

RULES = (
    WITHOUT_PIPELINE,
    Rules(
        title="With a flush",
        when=lambda job: job.pipeline.has_schedule and job.pipeline.can.flushes,
        why="has no meaning for {schedule}",
        fix="leave it out, or choose pipedream",
        words=(schedule,),
        rows=(
            Rule("--pipeline-update-interval"),
            Rule("--pipeline-vertical-sync"),
            Rule("--pipeline-allow-waits"),
        ),
    ),
    Rules(
        title="Flags of one schedule beside another",
        rows=(
            Rule(
                "--pipeline-replicas {pipeline_replicas}",
                when=lambda job: job.pipeline.pipeline_replicas is not None and job.pipeline.can.flushes,
                why="has no meaning for {schedule}",
                fix="leave it out, or choose pipedream",
                words=(schedule,),
            ),
            Rule(
                "--pipeline-memory-limit {pipeline_memory_limit}",
                when=lambda job: (
                    job.pipeline.has_schedule
                    and not job.pipeline.can.takes_limit
                    and job.pipeline.pipeline_memory_limit is not None
                    and job.pipeline.pipeline_offload != AUTO
                ),
                why="has no meaning for {schedule}",
                fix="leave it out, choose flex, or add --pipeline-offload auto",
                words=(schedule,),
            ),
            Rule(
                "--pipeline-costs {pipeline_costs}",
                when=lambda job: job.pipeline.pipeline_costs is not None and not job.pipeline.can.flushes,
                why="has no meaning for {schedule}, whose steps training does not predict",
                fix="leave it out, or choose a schedule that flushes",
                words=(schedule,),
            ),
            Rule(
                "--pipeline-loss-rank {pipeline_loss_rank}",
                when=lambda job: (
                    job.pipeline.pipeline_loss_rank is not None
                    and not job.pipeline.has_schedule
                    and job.flags.rehearse_pipeline is None
                ),
                why="has no effect under Megatron's own schedules",
                fix="add --pipeline-schedule, v-half for example",
            ),
            Rule(
                "--pipeline-loss-rank first",
                when=has_loss_elsewhere,
                why="has no meaning for {schedule}, whose loss is on the last rank",
                fix="leave it out, or choose a V, such as v-half",
                words=(schedule,),
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: job.pipeline.can.takes_limit and job.pipeline.pipeline_memory_limit is None,
                why="needs --pipeline-memory-limit",
                fix="give a fraction of 1F1B's peak, such as 0.5, or a number of bytes, or choose auto",
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: (
                    job.pipeline.can.measures_memory and job.precision.fp16 and job.flags.loss_scale is None
                ),
                why=(
                    "measures what memory is free after the first update, and the dynamic loss scale of "
                    "--fp16 skips the first ones"
                ),
                fix="use --bf16, set --loss-scale, or choose flex",
            ),
        ),
    ),
    Rules(
        title="Under every schedule of this package",
        when=lambda job: job.pipeline.has_schedule,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule("--use-megatron-fsdp", why="FSDP reduces gradients by its own hooks"),
            Rule("--use-torch-fsdp2", why="FSDP reduces gradients by its own hooks"),
            # In pairs a B leaves them to where Megatron would compute them under this flag.
            Rule(
                "--delay-wgrad-compute",
                when=lambda job: (
                    job.flags.delay_wgrad_compute and not job.parallel.overlap_moe_expert_parallel_comm
                ),
                why="schedules split the backward themselves",
            ),
            Rule(
                "--cuda-graph-impl local",
                why="Megatron's own schedules make these graphs when their first step ends",
                fix="choose transformer_engine or full_iteration",
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}",
                when=lambda job: has_graphs(job) and not job.flags.pipeline_unproved,
                why="graphs of its order were never run on a GPU",
                fix="try scripts/gpu_check.sh graphs and add --pipeline-unproved, or leave it out",
            ),
            # These are two older names, which Megatron turns into the first.
            Rule(
                "--enable-cuda-graph",
                why="Megatron's own schedules make these graphs when their first step ends",
                fix="choose --cuda-graph-impl transformer_engine or full_iteration",
            ),
            Rule(
                "--external-cuda-graph",
                why="it is an older name",
                fix="use --cuda-graph-impl transformer_engine",
            ),
            Rule("--hybrid-context-parallel", why="its microbatches differ from rank to rank"),
            # This is how stock's own schedules take microbatches and send messages.
            Rule(
                "--microbatch-group-size-per-virtual-pipeline-stage",
                when=lambda job: job.flags.microbatch_group_size_per_vp_stage,
                why="it orders the microbatches of Megatron's own interleaved schedule alone",
                fix="leave it out, or choose breadth-first, whose groups hold all microbatches",
            ),
            Rule(
                "--overlap-p2p-communication-warmup-flush",
                when=lambda job: job.flags.overlap_p2p_comm_warmup_flush,
                why="messages overlap computing throughout, in the warm-up and the flush too",
                fix="leave it out",
            ),
            Rule(
                "--no-overlap-p2p-communication",
                when=lambda job: job.flags.overlap_p2p_comm is False,
                why="messages always overlap computing",
                fix="leave it out",
            ),
            Rule(
                "--use-ring-exchange-p2p",
                why="each message leaves as soon as it is ready",
                fix="leave it out",
            ),
            Rule(
                "--pipeline-model-parallel-comm-backend ucc",
                why="messages go through groups of --distributed-backend",
                fix="leave it out",
            ),
            Rule(
                "--fine-grained-activation-offloading",
                when=lambda job: (
                    job.flags.fine_grained_activation_offloading
                    and job.is_set("--recompute-granularity", "full")
                ),
                why=(
                    "Megatron takes a layer that is recomputed for one of the microbatch whose forward "
                    "was last"
                ),
                fix="add --recompute-granularity selective, which recomputes modules, or leave it out",
            ),
            Rule(
                "--cpu-offloading-num-layers",
                why="Megatron has it without pipelines alone",
                fix="use --fine-grained-activation-offloading",
            ),
            Rule(
                "--moe-paged-stash",
                when=lambda job: job.flags.moe_paged_stash and changes_its_order(job),
                why="it holds all steps to the order of its first one",
                fix="choose a schedule that stays as it is, such as 1f1b",
            ),
            Rule("--defer-embedding-wgrad-compute", why="schedules defer weight gradients themselves"),
            Rule(
                "--overlap-param-gather-with-optimizer-step",
                why="it splits the optimizer by stock's order of chunks",
            ),
            Rule(
                "--full-validation",
                when=lambda job: job.flags.full_validation and not job.flags.multiple_validation_sets,
                why="Megatron fails at the first evaluation",
                fix=(
                    "leave it out and set --eval-iters, or, on two ranks with one chunk each, add "
                    "--multiple-validation-sets"
                ),
            ),
            Rule(
                "--multiple-validation-sets",
                when=lambda job: job.flags.multiple_validation_sets and not job.flags.full_validation,
                why="Megatron evaluates on several sets as a whole alone",
                fix="leave it out, or, on two ranks with one chunk each, add --full-validation",
            ),
            Rule(
                (
                    "multi-token prediction (m) in stage {predicting_stage}, counted from 0, of "
                    "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}"
                ),
                when=lambda job: not can_predict(job),
                why="it must be in a rank's last chunk, and on the first rank beside the E or the L",
                fix="put the m into stage {stages_for_prediction}",
                words=(
                    predicting_stage,
                    stages_for_prediction,
                ),
            ),
        ),
    ),
    Rules(
        title="Beside CUDA graphs",
        when=lambda job: job.pipeline.has_schedule and has_graphs(job),
        subject="--cuda-graph-impl {cuda_graph_impl}",
        rows=(
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                when=lambda job: not job.pipeline.can.flushes,
                why="without a flush no step is like the first one",
                fix="choose a schedule that flushes, or leave the graphs out",
            ),
            Rule(
                "a schedule that changes",
                when=changes_its_order,
                why="a graph holds one order",
                fix="choose a schedule that stays as it is, such as 1f1b",
            ),
            Rule("--rampup-batch-size", why="a graph holds one number of microbatches"),
            Rule("--step-batch-size-schedule", why="a graph holds one number of microbatches"),
            Rule(
                "--cuda-graph-warmup-steps 0",
                why="the first step finds the order, which graphs are made for",
                fix="set it to 1 or more",
            ),
            Rule("--pipeline-offload", why="the host waits for copies, and saved tensors are the graph's"),
            Rule(
                "--recompute-granularity full",
                when=lambda job: has_graphs(job, "transformer_engine") and job.memory.recomputes_layers,
                why="a layer that runs again would take the graph of another microbatch",
                fix="choose selective, or --cuda-graph-impl full_iteration",
            ),
            Rule(
                "--pipeline-trace",
                when=lambda job: has_graphs(job, "full_iteration") and job.is_set("--pipeline-trace"),
                why="actions within a graph have no times",
            ),
            Rule(
                "--mtp-num-layers",
                when=lambda job: has_graphs(job, "full_iteration") and is_v(job) and job.model.mtp_num_layers,
                why="a V moves the losses of predictions to another rank, which a graph adds up",
                fix="choose a schedule that is no V, such as interleaved",
            ),
        ),
    ),
    Rules(
        title="Where the backward is split",
        when=lambda job: job.splits and job.pipeline.has_schedule,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule(
                "--transformer-impl transformer_engine",
                why="layers of Transformer Engine {engine} cannot leave their weight gradient for later",
                fix="install transformer-engine 2.3 or newer, or add --transformer-impl local",
                releases="transformer-engine<2.3",
                words=(engine,),
            ),
            Rule(
                "--tp-comm-overlap",
                why="the buffers that it gathers into are used again before a weight gradient runs",
            ),
            Rule(
                "--use-transformer-engine-op-fuser",
                why=(
                    "a dense MLP's operations compute both gradients at once, and experts' are not made "
                    "before a forward"
                ),
            ),
            Rule(
                "--overlap-dispatch-backward-with-experts-wgrad",
                why="schedules defer weight gradients themselves",
            ),
            Rule(
                "--tensor-parallel-num-weight-shards",
                when=gathers_weights,
                why="a weight that is gathered for each use has no gradient to leave for later",
            ),
            Rule(
                "--expert-tensor-parallel-num-weight-shards",
                when=gathers_experts,
                why="a weight that is gathered for each use has no gradient to leave for later",
            ),
        ),
    ),
    Rules(
        title="Under a V",
        when=lambda job: job.pipeline.has_schedule and is_v(job),
        subject="--pipeline-schedule {pipeline_schedule}",
        why="a V has both ends of the model on one rank",
        fix="say where they go: --pipeline-model-parallel-layout '{layout_of_v}'",
        words=(layout_of_v,),
        rows=(
            Rule("--decoder-first-pipeline-num-layers"),
            Rule("--decoder-last-pipeline-num-layers"),
        ),
    ),
    Rules(
        title="With stages between the ends",
        when=lambda job: job.pipeline.has_schedule and job.placement is not None and job.placement.stages > 2,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule(
                "--multiple-validation-sets",
                why=(
                    "Megatron cannot count the samples of stages between the ends, nor those of several "
                    "chunks a rank"
                ),
                fix=(
                    "take two ranks and a schedule with one chunk a rank, or leave it and "
                    "--full-validation out and set --eval-iters"
                ),
            ),
        ),
    ),
)
