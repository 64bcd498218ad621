"""Megatron-LM on a machine without a GPU: stubs of torch.cuda and gloo.

Megatron-LM has no CPU mode. It does little on a GPU that a CPU cannot do, though: it names the device
"cuda", brackets copies with streams and events, and requests nccl. ``install`` answers those requests with
their CPU equivalents, so that a laptop, a CI runner or a test can run the real training loop, with real
process groups and real checkpoints. Nothing here is meant to be fast.

Each file has one task: ``torch_stubs`` stands in for torch.cuda, ``gloo`` replaces nccl, ``flags`` picks the
Megatron flags that a CPU needs, and ``checkpoint_writers`` forks processes that Megatron would start afresh.
Hooks into Megatron are in ``megatron_stubs`` and ``checkpoint_writers``; ``megatron.hooks`` lists them.
"""

import sys
import warnings

from megatron_pp_ext.cpu import gloo, torch_stubs
from megatron_pp_ext.cpu.checkpoint_writers import fork_checkpoint_writers
from megatron_pp_ext.cpu.flags import set_cpu_environment, with_cpu_flags

__all__ = ["fork_checkpoint_writers", "install", "with_cpu_flags"]

_installed = False


def install() -> None:
    """Put every stub in place, once; a second call does nothing.

    Megatron binds some of the replaced names while it is imported, so this has to come first.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core is already imported and has bound the real torch.cuda: "
            "call megatron_pp_ext.cpu.install() before importing Megatron"
        )
    set_cpu_environment()
    # A dozen of Megatron's modules warn of this while they are imported; on a CPU it is known.
    warnings.filterwarnings(
        "ignore",
        message="(.*(Apex|Transformer Engine).*not installed|Only transformer-engine)",
        category=UserWarning,
    )
    # torch._dynamo lists torch's functions by identity when it is imported: it has to see the originals.
    import torch._dynamo  # noqa: F401

    torch_stubs.redirect_devices()
    torch_stubs.stub_streams()
    torch_stubs.share_generator()
    gloo.install()
    _installed = True
