"""What Megatron itself cannot run, under its own schedules as under others.

It ends with a traceback when the model is built or in the first step, or does not end at all.
"""

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.names import AUTO

_LOGITS = "it looks for the output layer on every rank of the pipeline, and only one rank has it"
_ONE_RANK = "set --pipeline-model-parallel-size 1, or leave it out"

# Megatron's MLP returns its bias beside its output, to be added later.  As an output of the autograd
# function that recomputes (``CheckpointFunction`` in ``megatron.core.tensor_parallel.random``), this
# parameter gets the function as the origin of its own gradient.  Backward then computes it again, and goes
# back to where it is.  Layers of experts are not recomputed by this module.
_ENDLESS = Rules(
    "Under every schedule, Megatron's own too",
    lambda asked: True,
    rows=(
        Rule(
            "--recompute-modules mlp",
            "with biases calls itself without end in Megatron's backward",
            "add --disable-bias-linear, or recompute others, such as core_attn",
            lambda asked: (
                "mlp" in asked.job.memory.recomputed and asked.add_bias_linear and asked.has_dense_layer
            ),
        ),
        Rule(
            "--hybrid-layer-pattern {pattern}",
            "is built of Transformer Engine's layers, and Transformer Engine is not installed",
            "install it, which needs a GPU, or name other layers with --spec MODULE NAME",
            lambda asked: asked.pattern and not asked.has_own_layers,
            "transformer-engine==0",
        ),
    ),
)

_IN_PIPELINE = Rules(
    "In every pipeline, Megatron's own too",
    lambda asked: asked.in_pipeline,
    beside="Megatron in a pipeline",
    rows=(
        Rule("--logits-save-dir", _LOGITS, _ONE_RANK),
        Rule("--logits-load-dir", _LOGITS, _ONE_RANK),
        Rule(
            f"other flags that spread layers beside {layers.LAYOUT}",
            "the layout has all that they say",
            "leave {spreading_flags} out",
            lambda asked: asked.has_layout and asked.spreading_flags,
        ),
        Rule(
            "--overlap-moe-expert-parallel-comm",
            "layers of a hybrid model have no plans that could be run in pairs",
            "leave it out, or describe the model without --hybrid-layer-pattern",
            lambda asked: asked.overlap_moe_expert_parallel_comm and asked.pattern,
        ),
    ),
)

_SEVERAL_CHUNKS = Rules(
    "With several chunks a rank, under Megatron's own schedule too",
    lambda asked: (asked.chunks or 1) > 1,
    beside="Megatron with {chunks} chunks a rank",
    rows=(
        Rule(
            "--heterogeneous-layers-config-path",
            "its layers are built without knowing for which of several chunks of a rank",
            "choose a schedule with one chunk a rank, such as 1f1b or zb-h1, and leave "
            "--num-virtual-stages-per-pipeline-rank out",
            lambda asked: asked.has_heterogeneous_layers,
        ),
    ),
)

_ON_A_GPU = (
    "train it on a GPU with --transformer-impl transformer_engine, name other layers with --spec, or leave "
    "the flag out"
)

_LOCAL = Rules(
    "With Megatron's local layers, the only ones that run on a CPU",
    lambda asked: asked.transformer_impl == "local" and not asked.pattern and not asked.has_own_layers,
    beside="--transformer-impl local",
    rows=(
        Rule(
            "--experimental-attention-variant",
            "Megatron builds this attention of Transformer Engine's layers alone",
            _ON_A_GPU,
        ),
        Rule(
            "--multi-latent-attention",
            "Megatron's local attention knows no latent keys and values",
            _ON_A_GPU,
        ),
        Rule(
            "--moe-latent-size",
            "the projections around latent experts are Transformer Engine's",
            _ON_A_GPU,
            releases="transformer-engine==0",
        ),
    ),
)

_ATTENTION = Rules(
    "With attention of another kind",
    lambda asked: True,
    rows=(
        Rule(
            "--experimental-attention-variant gated_delta_net",
            "is that of some layers, and Megatron has to know of which",
            "give --linear-attention-freq",
            lambda asked: (
                asked.experimental_attention_variant == "gated_delta_net" and not asked.linear_attention_freq
            ),
        ),
        Rule(
            "--experimental-attention-variant dsa",
            "chooses among compressed keys alone",
            "add --multi-latent-attention",
            lambda asked: asked.experimental_attention_variant == "dsa" and not asked.multi_latent_attention,
        ),
        Rule(
            "--experimental-attention-variant dsa",
            "has an indexer whose sizes have no defaults",
            "give --dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk",
            lambda asked: (
                asked.experimental_attention_variant == "dsa"
                and not (asked.dsa_indexer_n_heads and asked.dsa_indexer_head_dim and asked.dsa_indexer_topk)
            ),
        ),
        Rule(
            "--attention-output-gate",
            "is a product with the result of ordinary attention, and Megatron's latent attention has none",
            "leave it or --multi-latent-attention out",
            lambda asked: asked.attention_output_gate and asked.multi_latent_attention,
        ),
    ),
)

_LAYOUT = Rules(
    f"Beside `{layers.LAYOUT} {AUTO}`",
    lambda asked: asked.finds_layout,
    beside=f"{layers.LAYOUT} {AUTO}",
    rows=(
        *(
            Rule(flag, "it chooses the layers of every stage itself", f"leave {flag} out")
            for flag in (*layers.SPREAD, "--num-layers-per-virtual-pipeline-stage")
        ),
        Rule(
            "--hybrid-layer-pattern",
            "Megatron cuts such a model at the | in it",
            "put them there, and leave the layout out",
            lambda asked: asked.pattern,
        ),
        Rule(
            "--mtp-num-layers with --pipeline-costs",
            "its costs cannot be told from those of the last layer",
            "leave --pipeline-costs out",
            lambda asked: asked.pipeline_costs is not None and asked.mtp_num_layers,
        ),
    ),
)

# Settings without a flag, which a script can only make in the model's config.
CONFIG = (
    Rules(
        "In the model's config",
        lambda config: True,
        beside="--pipeline-schedule",
        rows=(
            Rule(
                "num_microbatches_with_partial_activation_checkpoints in the model's config",
                "it counts microbatches in stock's order",
                "leave it out",
            ),
            Rule(
                "cuda_graph_impl in the model's config",
                "graphs are captured in stock's order of microbatches",
                "leave it out",
                lambda config: config.captures_graphs,
            ),
        ),
    ),
)

RULES = (_ENDLESS, _IN_PIPELINE, _SEVERAL_CHUNKS, _LOCAL, _ATTENTION, _LAYOUT)
