"""The Megatron flags and the environment that a CPU needs.

Megatron's defaults pick fused CUDA kernels, NCCL and Transformer Engine. Each flag below turns one of them
off. A flag that the user gives, with any value, stays as it is.
"""

import argparse
import os
from collections.abc import Collection, Sequence

CPU_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--use-cpu-initialization",),  # the other way initializes under the CUDA random state
    ("--transformer-impl", "local"),  # the other implementation is Transformer Engine
    ("--attention-backend", "unfused"),
    ("--no-gradient-accumulation-fusion",),  # a kernel of Apex
    ("--no-persist-layer-norm",),  # a kernel of Apex
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--async-strategy", "mcore"),  # the other starts its writers where nothing stands in for torch.cuda
    ("--num-workers", "0"),  # a worker process on each rank takes more memory than it saves time
)

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores: more threads only wait for each other
    # torch.compile takes longer than a small run.  --disable-jit-fuser comes when Megatron has been imported,
    # and with it the functions that it decorates.
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's argument checks require it
}


def with_cpu_flags(argv: Sequence[str], accepted: Collection[str] | None = None) -> list[str]:
    """Return ``argv`` and, after it, every flag that a CPU needs and ``argv`` does not set.

    ``accepted`` holds the flags that Megatron's parser accepts: a needed flag that this release of Megatron
    does not have yet, or no longer has, is left out. By default it is the installed Megatron's.
    """
    accepted = megatron_flags() if accepted is None else accepted
    flags = {word.partition("=")[0] for word in argv}
    added = [word for flag in CPU_FLAGS if flag[0] in accepted and flag[0] not in flags for word in flag]
    return [*argv, *added]


def megatron_flags() -> set[str]:
    """Return every flag that the installed Megatron, which this imports, accepts."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def set_cpu_environment() -> None:
    """Set the variables that are unset, before torch._dynamo is imported, which reads TORCHDYNAMO_DISABLE."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # OMP_NUM_THREADS has been read by now if torch was imported before.
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
