"""What other frameworks, and older releases of Megatron, do unlike Megatron 0.17 to 0.19.

Each is an argument by the name that Megatron gives it or once gave it, and one that is absent counts as
Megatron's of today.  Published runs of such frameworks are compared with estimates so.
"""

from argparse import Namespace


def divides_messages(args: Namespace) -> bool:
    """Whether tensor-parallel ranks each send a part of an activation that all have, and gather it behind.

    Megatron did so by default (arXiv 2104.04473, section 4.1), as DeepSpeed's pipelines do.  Under
    sequence parallelism ranks have parts anyway.
    """
    is_whole = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    return is_whole and bool(getattr(args, "scatter_gather_tensors_in_pipeline", False))


def overlaps_reduce(args: Namespace) -> bool:
    """Whether the tensor-parallel sum of an input gradient runs behind the product for the weight gradient.

    The fork of Megatron that trained BLOOM does not do so (Megatron-DeepSpeed, megatron/mpu/layers.py).
    """
    return bool(getattr(args, "async_tensor_model_parallel_allreduce", True))


def fuses_gradients(args: Namespace) -> bool:
    """Whether the product for a weight gradient adds to the buffer of gradients by itself."""
    return bool(getattr(args, "gradient_accumulation_fusion", True))
