"""What Megatron itself cannot run in a pipeline, under its own schedules as under others.

It ends with a traceback when the model is built or in the first step, or does not end at all.
"""

from argparse import Namespace

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.refusals import Refusal, refuse_first
from megatron_pp_ext.schedule.names import AUTO

_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")


def has_heterogeneous_layers(args: Namespace) -> bool:
    """Whether a file describes each layer of the model by itself."""
    return any(getattr(args, name, None) for name in _HETEROGENEOUS)


def _beside_layout(args: Namespace) -> list[str]:
    if args.pipeline_model_parallel_layout is None:
        return []
    return [flag for flag in layers.SPREAD if layers.value(args, flag)]


_LOGITS = "it looks for the output layer on every rank of the pipeline, and only one rank has it"
_ONE_RANK = "set --pipeline-model-parallel-size 1, or leave it out"

_IN_PIPELINE = (
    Refusal("--logits-save-dir", _LOGITS, _ONE_RANK),
    Refusal("--logits-load-dir", _LOGITS, _ONE_RANK),
    Refusal(
        f"other flags that spread layers beside {layers.LAYOUT}",
        "the layout has all that they say",
        lambda args: f"leave {' and '.join(_beside_layout(args))} out",
        lambda args: args.pipeline_model_parallel_layout != AUTO and _beside_layout(args),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "layers of a hybrid model have no plans that could be run in pairs",
        "leave it out, or describe the model without --hybrid-layer-pattern",
        lambda args: layers.value(args, "--overlap-moe-expert-parallel-comm") and layers.pattern(args),
    ),
)

_SEVERAL_CHUNKS = (
    Refusal(
        "--heterogeneous-layers-config-path",
        "its layers are built without knowing for which of several chunks of a rank",
        "choose a schedule with one chunk a rank, such as 1f1b or zb-h1, and leave "
        "--num-virtual-stages-per-pipeline-rank out",
        has_heterogeneous_layers,
    ),
)


def refuse_under_any_schedule(args: Namespace) -> None:
    """Raise ValueError for flags that Megatron cannot run, whatever the schedule."""
    _refuse_endless_recomputation(args)
    if args.pipeline_model_parallel_size > 1:
        refuse_first(args, _IN_PIPELINE, by="Megatron in a pipeline")


def refuse_chunks(args: Namespace, chunks: int) -> None:
    """Raise ValueError for flags that Megatron cannot run with ``chunks`` chunks a rank."""
    if chunks > 1:
        refuse_first(args, _SEVERAL_CHUNKS, by=f"Megatron with {chunks} chunks a rank")


def _refuse_endless_recomputation(args: Namespace) -> None:
    """Raise ValueError for recomputed MLPs with biases, whose backward calls itself until the job times out.

    Megatron's MLP returns its bias beside its output, to be added later.  As an output of the autograd
    function that recomputes (``CheckpointFunction`` in ``megatron.core.tensor_parallel.random``), this
    parameter gets the function as the origin of its own gradient.  Backward then computes it again, and goes
    back to where it is.  Layers of experts are not recomputed by this module.
    """
    is_selective = args.recompute_granularity == "selective" or getattr(args, "recompute_activations", False)
    if is_selective and "mlp" in (args.recompute_modules or ()) and args.add_bias_linear and _has_dense(args):
        raise ValueError(
            "--recompute-modules mlp with biases calls itself without end in Megatron's backward; add "
            "--disable-bias-linear, or recompute others, such as core_attn"
        )


def _has_dense(args: Namespace) -> bool:
    """Whether the model has a layer whose MLP is not one of experts."""
    letters = layers.pattern(args)
    if letters:
        return "-" in letters
    frequency = args.moe_layer_freq
    return not args.num_experts or (0 in frequency if isinstance(frequency, list) else frequency > 1)
