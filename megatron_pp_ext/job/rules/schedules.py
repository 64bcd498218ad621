"""What schedules of this package, backwards in two halves, CUDA graphs and measuring do not support."""

from collections.abc import Callable

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import ENGINE, RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.placement import FIRST

CONFIG = (
    Rules(
        title="In the model's config",
        subject="a schedule of megatron_pp_ext",
        rows=(
            Rule(
                "num_microbatches_with_partial_activation_checkpoints in the model's config",
                "it counts microbatches in stock's order",
                "leave it out",
                when=lambda job: job.is_set("num_microbatches_with_partial_activation_checkpoints"),
            ),
            Rule(
                "dynamic_context_parallel in the model's config",
                "the context-parallel groups of each microbatch join other pipelines",
                "leave it out",
                when=lambda job: job.is_set("dynamic_context_parallel"),
            ),
            Rule(
                "delay_wgrad_compute in the model's config",
                "layers would leave weight gradients where no schedule looks for them",
                "leave it out",
                when=lambda job: job.flags.delay_wgrad_compute,
            ),
        ),
    ),
)


def has_graphs(job: RequestedJob, kind: str | None = None) -> bool:
    """Whether CUDA graphs are captured, or those of a ``kind``."""
    graphs = job.precision.cuda_graph_impl
    return graphs != "none" if kind is None else graphs == kind


def _hold_one_order(job: RequestedJob) -> bool:
    """Whether CUDA graphs are right for the order of one training step alone."""
    return has_graphs(job, "full_iteration") or has_graphs(job, "local")


def _in_one_order(flag: str) -> Callable[[RequestedJob], bool]:
    """Return the condition that graphs hold the order of one step, and ``flag`` is set."""
    return lambda job: _hold_one_order(job) and job.is_set(flag)


CUDA_GRAPHS = Rules(
    title="With CUDA graphs",
    when=lambda job: job.pipeline.has_schedule and has_graphs(job),
    subject="--cuda-graph-impl {cuda_graph_impl}",
    rows=(
        Rule(
            "--pipeline-schedule {pipeline_schedule}",
            "without a flush no step is like the first one",
            "choose a schedule that flushes, or leave the graphs out",
            when=lambda job: not job.pipeline.can.flushes,
        ),
        Rule(
            "a schedule that changes",
            "a graph holds one order",
            "choose a schedule that stays as it is, such as 1f1b, or --cuda-graph-impl transformer_engine",
            when=lambda job: _hold_one_order(job) and job.changes_its_order,
        ),
        *(
            Rule(
                flag,
                "a graph holds one number of microbatches",
                "leave one of the two out, or choose --cuda-graph-impl transformer_engine",
                when=_in_one_order(flag),
            )
            for flag in ("--rampup-batch-size", "--step-batch-size-schedule")
        ),
        Rule(
            "--cuda-graph-warmup-steps 0",
            "the first step shows how many microbatches are in flight, and each has graphs",
            "set it to 1 or more",
            when=lambda job: not has_graphs(job, "local") and job.is_set("--cuda-graph-warmup-steps", "0"),
        ),
        Rule("--pipeline-offload", "the host waits for copies, and saved tensors are the graph's"),
        Rule(
            "--recompute-granularity full",
            "a layer that runs again would take the graph of another microbatch",
            "choose selective, or --cuda-graph-impl full_iteration",
            when=lambda job: has_graphs(job, "transformer_engine") and job.memory.recomputes_layers,
        ),
        Rule(
            "--pipeline-trace",
            "actions within a graph have no times",
            when=lambda job: has_graphs(job, "full_iteration") and job.is_set("--pipeline-trace"),
        ),
        Rule(
            "--mtp-num-layers",
            "a V moves the losses of predictions to another rank, which a graph adds up",
            "choose a schedule that is no V, such as interleaved",
            when=lambda job: has_graphs(job, "full_iteration") and job.is_v and job.model.mtp_num_layers,
        ),
    ),
)

LOCAL_GRAPHS = Rules(
    title="With Megatron's own CUDA graphs (`local`)",
    when=lambda job: job.pipeline.has_schedule and has_graphs(job, "local"),
    subject="--cuda-graph-impl local",
    fix="choose --cuda-graph-impl transformer_engine, or leave one of the two out",
    rows=(
        Rule(
            "--overlap-moe-expert-parallel-comm",
            "Megatron captures no backward between the forwards of a chunk's layers",
        ),
        Rule("--pipeline-vocabulary", "embeddings keep gradients in memory that the next graph overwrites"),
        Rule("--fine-grained-activation-offloading", "its copies were never tried with these graphs"),
        Rule(
            "--cuda-graph-scope full_iteration",
            "it is an older name of graphs of a whole iteration",
            "leave it out, or use --cuda-graph-impl full_iteration, which Megatron has since 0.18",
            when=lambda job: "full_iteration" in job.precision.graphed_modules,
        ),
        Rule(
            "--pipeline-schedule {pipeline_schedule}",
            "before Megatron 0.18 the next microbatch overwrites the input of a layer that has not gone back",
            "install megatron-core 0.18 or newer, or choose --cuda-graph-impl transformer_engine",
            when=lambda job: True,
            releases="megatron-core<0.18",
        ),
    ),
)


LAYER_SEEDS = (
    Rules(
        title="With `--pipeline-layer-seeds`",
        when=lambda job: job.flags.pipeline_layer_seeds,
        subject="--pipeline-layer-seeds",
        rows=(Rule("--init-model-with-meta-device", "weights are drawn after the model is built there"),),
    ),
)


MEASURING = (
    Rules(
        title="With `--profile-pipeline`",
        when=lambda job: job.flags.profile_pipeline is not None,
        subject="--profile-pipeline",
        fix="leave it out",
        rows=(
            Rule("--pipeline-schedule", "it measures layers under Megatron's own schedules"),
            Rule(
                "--recompute-granularity full",
                "layers would run twice, and keep no activations to be measured",
            ),
            Rule("--mtp-num-layers", "its layers are not in a profile"),
            Rule("--train-iters 1", "the first step only warms up", "set it to 2 or more"),
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
                "it goes by the memory that all ranks have free",
                "choose flex, and give it the limit",
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "it never flushes",
                "choose another schedule",
                when=lambda job: not job.pipeline.can.flushes,
            ),
            Rule("--pipeline-trace", "a rank that runs alone has no step of all ranks"),
            Rule("--pipeline-profile-steps", "ranks are measured together there"),
            Rule("--profile-pipeline", "it measures under Megatron's own schedules"),
            Rule(
                "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
                "its messages have two lengths",
                "put the m next to the L",
                when=lambda job: layers.predicts_before_the_end(job),
            ),
        ),
    ),
    Rules(
        title="What a rehearsal needs",
        rows=(
            Rule(
                "--rehearse-pipeline",
                "needs --fake-process-group",
                "start it with mpp rehearse",
                when=lambda job: job.flags.rehearse_pipeline is not None and not job.flags.fake_process_group,
            ),
        ),
    ),
)


def has_one_chunk(job: RequestedJob) -> bool:
    """Whether a rank has one chunk, as far as the placement is known."""
    return job.placement is not None and job.placement.chunks == 1


TURNED_OFF = Rules(
    title="What is turned off, with a line at the start",
    when=lambda job: job.pipeline.has_schedule,
    subject="--pipeline-schedule {pipeline_schedule}",
    fix="it is turned off, which changes no result",
    rows=(
        Rule("--defer-embedding-wgrad-compute", "schedules defer weight gradients themselves"),
        # A microbatch comes to a rank's chunks in the order of the model.  So chunk 0, whose weights are
        # gathered first, is the first to compute on every rank, whatever the schedule.
        Rule(
            "--overlap-param-gather-with-optimizer-step",
            "a rank has one chunk, and no other whose update could hide the gather of its weights",
            when=lambda job: job.is_set("--overlap-param-gather-with-optimizer-step") and has_one_chunk(job),
        ),
    ),
)
"""What a schedule does without, and the results of a job do not depend on."""


def engine(job: RequestedJob) -> str:
    """Return the version of Transformer Engine on the machine that trains."""
    return job.releases.get(ENGINE, "")


def gathers_weights(job: RequestedJob) -> bool:
    """Whether weights are cut into more parts than tensor-parallel ranks, and gathered for each use."""
    return (job.flags.tensor_parallel_num_weight_shards or 0) > job.parallel.tensor_model_parallel_size


SPLIT_BACKWARD = Rules(
    title="Where the backward is split",
    when=lambda job: job.splits and job.pipeline.has_schedule,
    subject="--pipeline-schedule {pipeline_schedule}",
    rows=(
        Rule(
            "--transformer-impl transformer_engine",
            "layers of Transformer Engine {engine} cannot leave their weight gradient for later",
            "install transformer-engine 2.3 or newer, or add --transformer-impl local",
            releases="transformer-engine<2.3",
            words=(engine,),
        ),
        Rule(
            "--tp-comm-overlap",
            "with --fp8-recipe mxfp8 gradients are gathered for W into buffers that later layers overwrite",
            "choose another recipe, or leave it out",
            when=lambda job: (
                job.parallel.tp_comm_overlap and job.precision.fp8 and job.precision.fp8_recipe == "mxfp8"
            ),
        ),
        Rule(
            "--cuda-graph-impl local",
            "its backwards are single graphs, which leave no weight gradient for later",
            "choose a schedule with whole backwards, such as interleaved or 1f1b-v, or --cuda-graph-impl "
            "transformer_engine",
        ),
        Rule("--overlap-dispatch-backward-with-experts-wgrad", "schedules defer weight gradients themselves"),
        Rule(
            "--tensor-parallel-num-weight-shards",
            "a weight that is gathered for each use has no gradient to leave for later",
            when=gathers_weights,
        ),
        Rule(
            "--expert-tensor-parallel-num-weight-shards",
            "a weight that is gathered for each use has no gradient to leave for later",
            when=lambda job: (
                (job.flags.expert_tensor_parallel_num_weight_shards or 0) > job.parallel.expert_tensor
            ),
        ),
    ),
)


def schedule(job: RequestedJob) -> str:
    """Return the name of the job's schedule, in words."""
    name = job.pipeline.pipeline_schedule
    return "Megatron's own schedules" if name is None else f"--pipeline-schedule {name}"


def predicting_stage(job: RequestedJob) -> int | None:
    """Return the stage with multi-token prediction."""
    return layers.predicting_stage(job, job.placement.stages) if job.placement else None


def stages_for_prediction(job: RequestedJob) -> str:
    """Return the stages that may have it, in words."""
    assert job.placement is not None
    return " or ".join(map(str, layers.stages_for_prediction(job.placement)))


def can_predict(job: RequestedJob) -> bool:
    """Whether multi-token prediction is where Megatron can train it, as far as the placement is known."""
    return job.placement is None or layers.can_predict(job, job.placement)


def has_loss_elsewhere(job: RequestedJob) -> bool:
    """Whether the loss is asked for on the first rank, where the placement, as far as known, has none."""
    if job.placement is None or not job.pipeline.has_schedule or job.pipeline.can.is_compiled:
        return False
    return job.pipeline.pipeline_loss_rank == FIRST and not job.placement.folds


def layout_of_v(job: RequestedJob) -> str:
    """Return the layout of a V with the embedding and head that other flags describe."""
    return layers.as_v(job)


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
        title="Flags of one schedule with another",
        words=(schedule,),
        rows=(
            Rule(
                "--pipeline-replicas {pipeline_replicas}",
                "has no meaning for {schedule}",
                "leave it out, or choose pipedream",
                when=lambda job: job.pipeline.pipeline_replicas is not None and job.pipeline.can.flushes,
            ),
            Rule(
                "--pipeline-memory-limit {pipeline_memory_limit}",
                "has no meaning for {schedule}",
                "leave it out, choose flex, or add --pipeline-offload auto",
                when=lambda job: (
                    job.pipeline.has_schedule
                    and not job.pipeline.can.takes_limit
                    and job.pipeline.pipeline_memory_limit is not None
                    and job.pipeline.pipeline_offload != AUTO
                ),
            ),
            Rule(
                "--pipeline-costs {pipeline_costs}",
                "has no meaning for {schedule}, whose steps training does not predict",
                "leave it out, or choose a schedule that flushes",
                when=lambda job: job.pipeline.pipeline_costs is not None and not job.pipeline.can.flushes,
            ),
            Rule(
                "--pipeline-loss-rank {pipeline_loss_rank}",
                "has no effect under Megatron's own schedules",
                "add --pipeline-schedule, v-half for example",
                when=lambda job: (
                    job.pipeline.pipeline_loss_rank is not None
                    and not job.pipeline.has_schedule
                    and job.flags.rehearse_pipeline is None
                ),
            ),
            Rule(
                "--pipeline-loss-rank first",
                "has no meaning for {schedule}, whose loss is on the last rank",
                "leave it out, or choose a V, such as v-half",
                when=has_loss_elsewhere,
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "needs --pipeline-memory-limit",
                "give a fraction of 1F1B's peak, such as 0.5, or a number of bytes, or choose auto",
                when=lambda job: job.pipeline.can.takes_limit and job.pipeline.pipeline_memory_limit is None,
            ),
            Rule(
                "--pipeline-schedule {pipeline_schedule}",
                "measures what memory is free after the first update, and the dynamic loss scale of "
                "--fp16 skips the first ones",
                "use --bf16, set --loss-scale, or choose flex",
                when=lambda job: (
                    job.pipeline.can.measures_memory and job.precision.fp16 and job.flags.loss_scale is None
                ),
            ),
        ),
    ),
    Rules(
        title="Under every schedule of this package",
        when=lambda job: job.pipeline.has_schedule,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule("--use-megatron-fsdp", "FSDP reduces gradients by its own hooks"),
            Rule("--use-torch-fsdp2", "FSDP reduces gradients by its own hooks"),
            # In pairs a B leaves them to where Megatron would compute them under this flag.
            Rule(
                "--delay-wgrad-compute without --overlap-moe-expert-parallel-comm",
                "schedules split the backward themselves",
                "leave it out",
                when=lambda job: (
                    job.flags.delay_wgrad_compute and not job.parallel.overlap_moe_expert_parallel_comm
                ),
            ),
            Rule(
                "--cuda-graph-impl {cuda_graph_impl}",
                "graphs of its order were never run on a GPU",
                "try scripts/gpu_check.sh graphs and add --pipeline-unproved, or leave it out",
                when=lambda job: has_graphs(job) and not job.flags.pipeline_unproved,
            ),
            # These are two older names, which Megatron replaces by the first.
            Rule("--enable-cuda-graph", "it is an older name", "use --cuda-graph-impl local"),
            Rule("--external-cuda-graph", "it is an older name", "use --cuda-graph-impl transformer_engine"),
            Rule("--hybrid-context-parallel", "its microbatches differ from rank to rank"),
            # This is how stock's own schedules take microbatches and send messages.
            Rule(
                "--microbatch-group-size-per-virtual-pipeline-stage",
                "it orders the microbatches of Megatron's own interleaved schedule alone",
                "leave it out, or choose breadth-first, whose groups hold all microbatches",
                when=lambda job: job.flags.microbatch_group_size_per_vp_stage,
            ),
            Rule(
                "--overlap-p2p-communication-warmup-flush",
                "messages overlap computing throughout, in the warm-up and the flush too",
                "leave it out",
                when=lambda job: job.flags.overlap_p2p_comm_warmup_flush,
            ),
            Rule(
                "--no-overlap-p2p-communication",
                "messages always overlap computing",
                "leave it out",
                when=lambda job: not job.parallel.overlap_p2p_comm,
            ),
            Rule("--use-ring-exchange-p2p", "each message leaves as soon as it is ready", "leave it out"),
            Rule(
                "--pipeline-model-parallel-comm-backend ucc",
                "messages go through groups of --distributed-backend",
                "leave it out",
            ),
            Rule(
                "--fine-grained-activation-offloading",
                "Megatron takes a layer that is recomputed for one of the microbatch whose forward was last",
                "add --recompute-granularity selective, which recomputes modules, or leave it out",
                when=lambda job: (
                    job.flags.fine_grained_activation_offloading
                    and job.is_set("--recompute-granularity", "full")
                ),
            ),
            Rule(
                "--cpu-offloading-num-layers",
                "Megatron has it without pipelines alone",
                "use --fine-grained-activation-offloading",
            ),
            Rule(
                "--moe-paged-stash",
                "it holds all steps to the order of its first one",
                "choose a schedule that stays as it is, such as 1f1b",
                when=lambda job: job.precision.moe_paged_stash and job.changes_its_order,
            ),
            Rule(
                "--full-validation",
                "Megatron fails at the first evaluation",
                "leave it out and set --eval-iters, or, on two ranks with one chunk each, add "
                "--multiple-validation-sets",
                when=lambda job: job.flags.full_validation and not job.flags.multiple_validation_sets,
            ),
            Rule(
                "--multiple-validation-sets",
                "Megatron evaluates on several sets as a whole alone",
                "leave it out, or, on two ranks with one chunk each, add --full-validation",
                when=lambda job: job.flags.multiple_validation_sets and not job.flags.full_validation,
            ),
            Rule(
                "multi-token prediction (m) in stage {predicting_stage}, counted from 0, of "
                "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
                "it must be in a rank's last chunk, and on the first rank next to the E or the L",
                "put the m into stage {stages_for_prediction}",
                when=lambda job: not can_predict(job),
                words=(predicting_stage, stages_for_prediction),
            ),
        ),
    ),
    CUDA_GRAPHS,
    LOCAL_GRAPHS,
    SPLIT_BACKWARD,
    Rules(
        title="Under a V",
        when=lambda job: job.pipeline.has_schedule and job.is_v,
        subject="--pipeline-schedule {pipeline_schedule}",
        why="a V has both ends of the model on one rank",
        fix="say where they go: --pipeline-model-parallel-layout '{layout_of_v}'",
        words=(layout_of_v,),
        rows=(Rule("--decoder-first-pipeline-num-layers"), Rule("--decoder-last-pipeline-num-layers")),
    ),
    Rules(
        title="With stages between the ends",
        when=lambda job: job.pipeline.has_schedule and job.placement is not None and job.placement.stages > 2,
        subject="--pipeline-schedule {pipeline_schedule}",
        rows=(
            Rule(
                "--multiple-validation-sets",
                "Megatron cannot count the samples of stages between the ends, nor those of several "
                "chunks a rank",
                "take two ranks and a schedule with one chunk a rank, or leave it and --full-validation "
                "out and set --eval-iters",
            ),
        ),
    ),
)
