"""Which layers exist only in Transformer Engine's form, and what to do where that is not at hand."""

from argparse import Namespace

from megatron.core.extensions import transformer_engine

from megatron_pp_ext.job.refusals import Refusal, refuse_first

_ON_A_GPU = "train it on a GPU with --transformer-impl transformer_engine, name other layers with --spec, or "

_LOCAL = (
    Refusal(
        "--experimental-attention-variant",
        "Megatron builds this attention of Transformer Engine's layers alone",
        f"{_ON_A_GPU}leave the flag out",
    ),
    Refusal(
        "--multi-latent-attention",
        "Megatron's local attention knows no latent keys and values",
        f"{_ON_A_GPU}leave the flag out",
    ),
    Refusal(
        "--moe-latent-size",
        "the projections around latent experts are Transformer Engine's",
        f"{_ON_A_GPU}leave the flag out",
        lambda args: getattr(args, "moe_latent_size", None) and not transformer_engine.HAVE_TE,
    ),
)
"""Models that Megatron cannot build of its local layers, the only ones that run on a CPU."""


def require_layers(args: Namespace) -> None:
    """Raise ValueError for a model that needs Transformer Engine's layers where a run has none.

    All of Megatron's hybrid specs, the default among them, are made of these modules, in whose place Megatron
    has objects that fail without a message where Transformer Engine is not installed.
    """
    spec = getattr(args, "spec", None)
    if spec is not None and not spec[0].startswith("megatron.core."):
        return
    pattern = args.hybrid_layer_pattern or getattr(args, "hybrid_override_pattern", None)
    if pattern and not transformer_engine.HAVE_TE:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is built of Transformer Engine's layers, and Transformer "
            "Engine is not installed; install it, which needs a GPU, or name other layers with --spec "
            "MODULE NAME"
        )
    if args.transformer_impl == "local" and not pattern:
        refuse_first(args, _LOCAL, by="--transformer-impl local")
