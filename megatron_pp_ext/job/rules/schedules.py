"""What a schedule of this package cannot do with."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.names import AUTO, FLEX, PIPEDREAM

FIRST_ENGINE = "2.3"
"""The first Transformer Engine whose modules have a store (``WeightGradStore``, module/_common.py)."""

_SCHEDULE = "--pipeline-schedule {pipeline_schedule}"
_GRAPHS = "graphs are captured in stock's order of microbatches"
_GATHERED = "a weight that is gathered for each use has no gradient to leave for later"

_ALWAYS = Rules(
    "Under every schedule of this package",
    lambda asked: asked.has_schedule,
    beside=_SCHEDULE,
    rows=(
        Rule("--use-megatron-fsdp", "FSDP reduces gradients by its own hooks"),
        Rule("--use-torch-fsdp2", "FSDP reduces gradients by its own hooks"),
        Rule("--delay-wgrad-compute", "schedules split the backward themselves"),
        Rule("--cuda-graph-impl", _GRAPHS, asked=lambda asked: asked.captures_graphs),
        # Two older names, which Megatron turns into the first.
        Rule("--enable-cuda-graph", _GRAPHS),
        Rule("--external-cuda-graph", _GRAPHS),
        Rule("--hybrid-context-parallel", "its microbatches differ from rank to rank"),
        # How stock's own schedules take microbatches and send messages.
        Rule(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "it orders the microbatches of Megatron's own interleaved schedule alone",
            "leave it out, or choose breadth-first, whose groups hold all microbatches",
            lambda asked: asked.microbatch_group_size_per_vp_stage,
        ),
        Rule(
            "--overlap-p2p-communication-warmup-flush",
            "messages overlap computing throughout, in the warm-up and the flush too",
            "leave it out",
            lambda asked: asked.overlap_p2p_comm_warmup_flush,
        ),
        Rule(
            "--no-overlap-p2p-communication",
            "messages always overlap computing",
            "leave it out",
            lambda asked: asked.overlap_p2p_comm is False,
        ),
        Rule("--use-ring-exchange-p2p", "each message leaves as soon as it is ready", "leave it out"),
        Rule(
            "--pipeline-model-parallel-comm-backend ucc",
            "messages go through groups of --distributed-backend",
            "leave it out",
            lambda asked: asked.pipeline_model_parallel_comm_backend == "ucc",
        ),
        Rule(
            "--fine-grained-activation-offloading",
            "Megatron takes a layer that is recomputed for one of the microbatch whose forward was last",
            "add --recompute-granularity selective, which recomputes modules, or leave it out",
            lambda asked: asked.fine_grained_activation_offloading and asked.recompute_granularity == "full",
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
            lambda asked: (
                asked.moe_paged_stash
                and (asked.can.measures_memory or asked.pipeline_profile_steps is not None)
            ),
        ),
        Rule("--defer-embedding-wgrad-compute", "schedules defer weight gradients themselves"),
        Rule(
            "--overlap-param-gather-with-optimizer-step", "it splits the optimizer by stock's order of chunks"
        ),
        Rule(
            "--full-validation",
            "Megatron fails at the first evaluation",
            "leave it out and set --eval-iters, or, on two ranks with one chunk each, add "
            "--multiple-validation-sets",
            lambda asked: asked.full_validation and not asked.multiple_validation_sets,
        ),
        Rule(
            "--multiple-validation-sets",
            "Megatron evaluates on several sets as a whole alone",
            "leave it out, or, on two ranks with one chunk each, add --full-validation",
            lambda asked: asked.multiple_validation_sets and not asked.full_validation,
        ),
        Rule(
            "multi-token prediction (m) in stage {predicting_stage}, counted from 0, of "
            "--pipeline-model-parallel-layout {pipeline_model_parallel_layout}",
            "it must be in a rank's last chunk, and on the first rank beside the E or the L",
            "put the m into stage {stages_for_prediction}",
            lambda asked: asked.placement and not layers.can_predict(asked.job, asked.placement),
        ),
    ),
)

_SPLIT = Rules(
    "Where the backward is split",
    lambda asked: asked.splits and asked.has_schedule,
    beside=_SCHEDULE,
    rows=(
        Rule(
            "--transformer-impl transformer_engine",
            "layers of Transformer Engine {engine} cannot leave their weight gradient for later",
            f"install transformer-engine {FIRST_ENGINE} or newer, or add --transformer-impl local",
            lambda asked: asked.transformer_impl == "transformer_engine",
            f"transformer-engine<{FIRST_ENGINE}",
        ),
        Rule(
            "--tp-comm-overlap",
            "the buffers that it gathers into are used again before a weight gradient runs",
        ),
        Rule(
            "--use-transformer-engine-op-fuser",
            "a dense MLP's operations compute both gradients at once, and experts' are not made before a "
            "forward",
        ),
        Rule("--overlap-dispatch-backward-with-experts-wgrad", "schedules defer weight gradients themselves"),
        Rule("--tensor-parallel-num-weight-shards", _GATHERED, asked=lambda asked: asked.gathers_weights),
        Rule(
            "--expert-tensor-parallel-num-weight-shards", _GATHERED, asked=lambda asked: asked.gathers_experts
        ),
    ),
)

_MIRRORED = Rules(
    "Under a V",
    lambda asked: asked.has_schedule and asked.placement and asked.placement.is_mirrored(1),
    beside=_SCHEDULE,
    rows=tuple(
        Rule(
            flag,
            "a V has both ends of the model on one rank",
            "say where they go: --pipeline-model-parallel-layout '{layout_of_v}'",
        )
        for flag in layers.ENDS
    ),
)

_BETWEEN_ENDS = Rules(
    "With stages between the ends",
    lambda asked: asked.has_schedule and asked.placement and asked.placement.stages > 2,
    beside=_SCHEDULE,
    rows=(
        Rule(
            "--multiple-validation-sets",
            "Megatron cannot count the samples of stages between the ends, nor those of several chunks a "
            "rank",
            "take two ranks and a schedule with one chunk a rank, or leave it and --full-validation out and "
            "set --eval-iters",
        ),
    ),
)

_ALONE = (
    "needs a pipeline of 2 ranks or more, got --pipeline-model-parallel-size {pipeline_model_parallel_size}"
)
_SEVERAL = "set it to 2 or more, or leave the flag out"

NO_PIPELINE = Rules(
    "Without a pipeline",
    lambda asked: not asked.in_pipeline,
    rows=(
        Rule("--pipeline-vocabulary {pipeline_vocabulary}", _ALONE, _SEVERAL),
        Rule(f"--pipeline-model-parallel-layout {AUTO}", _ALONE, _SEVERAL, lambda asked: asked.finds_layout),
        Rule(_SCHEDULE, _ALONE, _SEVERAL),
        Rule("--pipeline-trace", _ALONE, _SEVERAL),
    ),
)

_NO_MEANING = "has no meaning for {schedule}"
_OR_PIPEDREAM = f"leave it out, or choose {PIPEDREAM}"
_OR_FLEX = f"leave it out, choose {FLEX}, or add --pipeline-offload {AUTO}"

_UPDATES = Rules(
    "With a flush",
    lambda asked: asked.has_schedule and asked.can.flushes,
    rows=tuple(
        Rule(flag, _NO_MEANING, _OR_PIPEDREAM)
        for flag in (
            "--pipeline-update-interval",
            "--pipeline-vertical-sync",
            "--pipeline-allow-waits",
            "--pipeline-delay-correction",
        )
    ),
)

_MEANING = Rules(
    "Flags of one schedule beside another",
    lambda asked: True,
    rows=(
        Rule(
            "--pipeline-replicas {pipeline_replicas}",
            _NO_MEANING,
            _OR_PIPEDREAM,
            lambda asked: asked.pipeline_replicas is not None and asked.can.flushes,
        ),
        Rule(
            "--pipeline-memory-limit {pipeline_memory_limit}",
            _NO_MEANING,
            _OR_FLEX,
            lambda asked: (
                asked.has_schedule
                and not asked.can.takes_limit
                and asked.pipeline_memory_limit is not None
                and asked.pipeline_offload != AUTO
            ),
        ),
        Rule(
            "--pipeline-costs {pipeline_costs}",
            "has no meaning for {schedule}, whose steps training does not predict",
            "leave it out, or choose a schedule that flushes",
            lambda asked: asked.pipeline_costs is not None and not asked.can.flushes,
        ),
        Rule(
            _SCHEDULE,
            "needs --pipeline-memory-limit",
            "give a fraction of 1F1B's peak, such as 0.5, or a number of bytes, or choose auto",
            lambda asked: asked.can.takes_limit and asked.pipeline_memory_limit is None,
        ),
        Rule(
            _SCHEDULE,
            "measures what memory is free after the first update, and the dynamic loss scale of --fp16 skips "
            "the first ones",
            "use --bf16, set --loss-scale, or choose flex",
            lambda asked: asked.can.measures_memory and asked.fp16 and asked.loss_scale is None,
        ),
    ),
)

RULES = (NO_PIPELINE, _UPDATES, _MEANING, _ALWAYS, _SPLIT, _MIRRORED, _BETWEEN_ENDS)
