"""What Megatron itself cannot run, under any schedule, and what a search refuses before it asks Megatron."""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Rule, Rules


def has_own_layers(job: RequestedJob) -> bool:
    """Whether --spec names layers that are not Megatron's."""
    return job.flags.spec is not None and not job.flags.spec[0].startswith("megatron.core.")


def has_indexer(job: RequestedJob) -> bool:
    """Whether all sizes of sparse attention's indexer are given."""
    dsa = job.attention
    return bool(dsa.dsa_indexer_n_heads and dsa.dsa_indexer_head_dim and dsa.dsa_indexer_topk)


def pattern(job: RequestedJob) -> str | None:
    """Return the layers of a hybrid model."""
    return job.model.pattern


def spreading_flags(job: RequestedJob) -> str:
    """Return the flags that spread layers over stages otherwise than a layout; empty without one."""
    return " and ".join(flag for flag in layers.SPREAD if job.is_set(flag))


def chunks(job: RequestedJob) -> int | None:
    """Return the chunks a rank."""
    return job.chunks


RULES = (
    Rules(
        title="Under every schedule, Megatron's own too",
        rows=(
            # Megatron's MLP returns its bias besides its output, to be added later.  As an output of the
            # autograd function that recomputes (CheckpointFunction in megatron.core.tensor_parallel.random),
            # this parameter gets the function as the origin of its own gradient.  Backward then computes it
            # again, and goes back to where it is.  Layers of experts are not recomputed by this module.
            Rule(
                "--recompute-modules mlp",
                "with biases calls itself without end in Megatron's backward",
                "add --disable-bias-linear, or recompute others, such as core_attn",
                when=lambda job: (
                    "mlp" in job.memory.recomputed and job.model.add_bias_linear and job.model.has_dense_layer
                ),
            ),
            # Only DistributedDataParallel asserts this, when the model is built.
            Rule(
                "--num-distributed-optimizer-instances {num_distributed_optimizer_instances}",
                "divides the ranks that share the distributed optimizer's state, and there is none",
                "add --use-distributed-optimizer, or leave it out",
                when=lambda job: (
                    job.memory.num_distributed_optimizer_instances > 1
                    and not (job.memory.use_distributed_optimizer or job.memory.use_megatron_fsdp)
                ),
            ),
            Rule(
                "--hybrid-layer-pattern {pattern}",
                "is built of Transformer Engine's layers, and Transformer Engine is not installed",
                "install it, which needs a GPU, or name other layers with --spec MODULE NAME",
                when=lambda job: job.model.pattern and not has_own_layers(job),
                releases="transformer-engine==0",
                words=(pattern,),
            ),
        ),
    ),
    Rules(
        title="In every pipeline, Megatron's own too",
        when=lambda job: job.parallel.pipeline_model_parallel_size > 1,
        subject="Megatron in a pipeline",
        why="it looks for the output layer on every rank of the pipeline, and only one rank has it",
        fix="set --pipeline-model-parallel-size 1, or leave it out",
        rows=(
            Rule("--logits-save-dir"),
            Rule("--logits-load-dir"),
            # GPTModel builds the last stage with an output weight that it never uses, and its checkpoint has
            # no place for it (tie_embeddings_and_output_weights_state_dict in language_module.py).  The
            # format torch asks for none.
            Rule(
                "--save {save} of tied embeddings with multi-token prediction next to the output layer",
                "its first checkpoint ends with an AssertionError",
                "add --untie-embeddings-and-output-weights, give the m a stage before the L in "
                "--pipeline-model-parallel-layout, or leave --save out",
                when=lambda job: (
                    job.flags.save
                    and job.model.mtp_num_layers
                    and not job.model.untie_embeddings_and_output_weights
                    and not layers.predicts_before_the_end(job)
                    and job.flags.ckpt_format != "torch"
                ),
            ),
            Rule(
                "other flags that spread layers, with --pipeline-model-parallel-layout",
                "the layout has all that they say",
                "leave {spreading_flags} out",
                when=lambda job: job.pipeline.has_layout and spreading_flags(job),
                words=(spreading_flags,),
            ),
            Rule(
                "--overlap-moe-expert-parallel-comm",
                "layers of a hybrid model have no plans that could be run in pairs",
                "leave it out, or describe the model without --hybrid-layer-pattern",
                when=lambda job: job.parallel.overlap_moe_expert_parallel_comm and job.model.pattern,
            ),
        ),
    ),
    Rules(
        title="Where zstandard is missing",
        rows=(
            Rule(
                "--logits-save-dir",
                "writes by zstandard, without which the writer ends and its rank waits for it",
                "pip install zstandard",
                releases="zstandard==0",
            ),
            Rule(
                "--logits-load-dir",
                "reads by zstandard, which is not installed",
                "pip install zstandard",
                releases="zstandard==0",
            ),
        ),
    ),
    Rules(
        title="With several chunks a rank, under Megatron's own schedule too",
        when=lambda job: (job.chunks or 0) > 1,
        subject="Megatron with {chunks} chunks a rank",
        words=(chunks,),
        rows=(
            Rule(
                "--heterogeneous-layers-config-path",
                "its layers are built without knowing for which of several chunks of a rank",
                "choose a schedule with one chunk a rank, such as 1f1b or zb-h1, and leave "
                "--num-virtual-stages-per-pipeline-rank out",
                when=lambda job: job.model.has_heterogeneous_layers,
            ),
        ),
    ),
    Rules(
        title="With Megatron's local layers, the only ones that run on a CPU",
        when=lambda job: (
            job.precision.transformer_impl == "local" and not job.model.pattern and not has_own_layers(job)
        ),
        subject="--transformer-impl local",
        fix=(
            "train it on a GPU with --transformer-impl transformer_engine, name other layers with "
            "--spec, or leave the flag out"
        ),
        rows=(
            Rule(
                "--experimental-attention-variant",
                "Megatron builds this attention of Transformer Engine's layers alone",
            ),
            Rule("--multi-latent-attention", "Megatron's local attention knows no latent keys and values"),
            Rule(
                "--moe-latent-size",
                "the projections around latent experts are Transformer Engine's",
                releases="transformer-engine==0",
            ),
        ),
    ),
    Rules(
        title="With attention of another kind",
        rows=(
            Rule(
                "--experimental-attention-variant gated_delta_net",
                "is that of some layers, and Megatron has to know of which",
                "give --linear-attention-freq",
                when=lambda job: (
                    job.attention.experimental_attention_variant == "gated_delta_net"
                    and not job.attention.linear_attention_freq
                ),
            ),
            Rule(
                "--experimental-attention-variant dsa",
                "chooses among compressed keys alone",
                "add --multi-latent-attention",
                when=lambda job: (
                    job.attention.experimental_attention_variant == "dsa"
                    and not job.attention.multi_latent_attention
                ),
            ),
            Rule(
                "--experimental-attention-variant dsa",
                "has an indexer whose sizes have no defaults",
                "give --dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk",
                when=lambda job: (
                    job.attention.experimental_attention_variant == "dsa" and not has_indexer(job)
                ),
            ),
            Rule(
                "--attention-output-gate",
                "is a product with the result of ordinary attention, and Megatron's latent attention has "
                "none",
                "leave it or --multi-latent-attention out",
                when=lambda job: job.attention.attention_output_gate and job.attention.multi_latent_attention,
            ),
        ),
    ),
    Rules(
        title="With `--pipeline-model-parallel-layout auto`",
        when=lambda job: job.pipeline.finds_layout,
        subject="--pipeline-model-parallel-layout auto",
        why="it chooses the layers of every stage itself",
        rows=(
            Rule("--decoder-first-pipeline-num-layers", fix="leave --decoder-first-pipeline-num-layers out"),
            Rule("--decoder-last-pipeline-num-layers", fix="leave --decoder-last-pipeline-num-layers out"),
            Rule(
                "--account-for-embedding-in-pipeline-split",
                fix="leave --account-for-embedding-in-pipeline-split out",
            ),
            Rule(
                "--account-for-loss-in-pipeline-split", fix="leave --account-for-loss-in-pipeline-split out"
            ),
            Rule(
                "--num-layers-per-virtual-pipeline-stage",
                fix="leave --num-layers-per-virtual-pipeline-stage out",
            ),
            Rule(
                "--hybrid-layer-pattern",
                "Megatron cuts such a model at the | in it",
                "put them there, and leave the layout out",
                when=lambda job: job.model.pattern,
            ),
            Rule(
                "--mtp-num-layers with --pipeline-costs",
                "its costs cannot be told from those of the last layer",
                "leave --pipeline-costs out",
                when=lambda job: job.pipeline.pipeline_costs is not None and job.model.mtp_num_layers,
            ),
        ),
    ),
)
"""Without a refusal Megatron ends with a traceback when the model is built or in the first step, or does not
end at all.  What it refuses when it starts is asked of the installed one (``job.ask_megatron``).
"""


def chunk_flag(job: RequestedJob) -> str:
    """Return the flag by which Megatron cuts a rank's layers into chunks; empty without one."""
    return next(filter(job.is_set, layers.CHUNKS), "")


def described_twice(job: RequestedJob) -> str:
    """Return the flag that spreads layers over stages in another way than a pattern; empty without one."""
    flags = (*layers.SPREAD[len(layers.ENDS) :], *layers.CHUNKS, layers.LAYOUT)
    return next(filter(job.is_set, flags), "")


def ends_alone(job: RequestedJob) -> str:
    """Return the flag that gives an end of a pipeline its layers where there is none; empty without one."""
    is_alone = job.parallel.pipeline_model_parallel_size == 1
    return next(iter(layers.given_ends(job)), "") if is_alone else ""


PLANNED = (
    Rules(
        title="In `mpp estimate` and `mpp search`, about stages",
        rows=(
            Rule(
                "--num-layers-per-virtual-pipeline-stage",
                "says the same as --num-virtual-stages-per-pipeline-rank",
                "leave one of the two out",
                when=lambda job: (
                    job.pipeline.num_layers_per_virtual_pipeline_stage is not None
                    and job.pipeline.num_virtual_stages_per_pipeline_rank is not None
                ),
            ),
            Rule(
                "--pipeline-model-parallel-layout",
                "says how many chunks a rank has",
                "leave {chunk_flag} out",
                when=lambda job: job.pipeline.has_layout and chunk_flag(job),
                words=(chunk_flag,),
            ),
            Rule(
                "{described_twice}",
                "is not for --hybrid-layer-pattern, whose | are between stages",
                "leave it out",
                when=lambda job: job.model.hybrid_layer_pattern and described_twice(job),
                words=(described_twice,),
            ),
            Rule(
                "{ends_alone}",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=ends_alone,
                words=(ends_alone,),
            ),
            Rule(
                "{chunk_flag}",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=lambda job: (
                    job.parallel.pipeline_model_parallel_size <= 1
                    and chunk_flag(job)
                    and (layers.chunks_requested(job) or 1) > 1
                ),
                words=(chunk_flag,),
            ),
            Rule(
                "--defer-embedding-wgrad-compute",
                "is for a pipeline of two ranks or more",
                "leave it out",
                when=lambda job: (
                    job.parallel.defer_embedding_wgrad_compute
                    and job.parallel.pipeline_model_parallel_size <= 1
                ),
            ),
            Rule(
                "--cpu-offloading-num-layers",
                "is for training without a pipeline",
                "use --fine-grained-activation-offloading, or --pipeline-offload auto",
                when=lambda job: (
                    job.memory.cpu_offloading_num_layers and job.parallel.pipeline_model_parallel_size > 1
                ),
            ),
        ),
    ),
    Rules(
        title="In `mpp estimate` and `mpp search`, where Megatron starts and computes something else",
        rows=(
            Rule(
                "--recompute-num-layers 0",
                "makes no groups of layers",
                "set it to 1 or more",
                when=lambda job: (
                    job.memory.recomputes_layers
                    and job.memory.recompute_method == "uniform"
                    and job.argument("recompute_num_layers") == 0
                ),
            ),
            Rule(
                "--num-distributed-optimizer-instances {num_distributed_optimizer_instances}",
                "with --use-megatron-fsdp copies groups of weight shards, which is not modelled",
                "leave one of the two out",
                when=lambda job: (
                    job.memory.num_distributed_optimizer_instances > 1 and job.memory.use_megatron_fsdp
                ),
            ),
            Rule(
                "--moe-expert-capacity-factor 0",
                "drops every token",
                "raise it",
                when=lambda job: job.model.expert_capacity == 0,
            ),
            Rule(
                "--fp8-format",
                "with weights in fp32 is not modelled",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: job.precision.fp8 and not job.precision.is_half,
            ),
            Rule(
                "--fp8-format",
                "has no effect on --transformer-impl local, whose products are not in FP8",
                "leave one of the two out",
                when=lambda job: job.precision.fp8 and job.precision.transformer_impl == "local",
            ),
            Rule(
                "--attention-backend {attention_backend}",
                "has no kernel for fp32",
                "add --bf16 or --fp16, or leave it out",
                when=lambda job: (
                    job.precision.attention_backend in ("flash", "fused") and not job.precision.is_half
                ),
            ),
        ),
    ),
)
"""Megatron refuses these at its start.  But a search tries pipelines and chunks that no flag sets, and cannot
ask for each of thousands of candidates.
"""
