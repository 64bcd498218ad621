"""What the layers of a HybridModel need that a machine may lack."""

from argparse import Namespace

from megatron.core.extensions import transformer_engine


def require_layers(args: Namespace) -> None:
    """Raise ValueError for a hybrid model of Megatron's own layers where Transformer Engine is not installed.

    All of its hybrid specs, the default among them, are made of Transformer Engine's modules, in whose place
    Megatron then has objects that fail without a message.
    """
    pattern = args.hybrid_layer_pattern or getattr(args, "hybrid_override_pattern", None)
    spec = getattr(args, "spec", None)
    if pattern and not transformer_engine.HAVE_TE and (spec is None or spec[0].startswith("megatron.core.")):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is built of Transformer Engine's layers, and Transformer "
            "Engine is not installed; install it, which needs a GPU, or name other layers with --spec "
            "MODULE NAME"
        )
