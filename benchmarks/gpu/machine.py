"""A machine's report of its device, as JSON: torch, NCCL and packages; or whether something works there.

    python -m benchmarks.gpu.machine [--dry] [--try compile|attention]

It runs as a process of its own, so that the check itself holds no device.
"""

import json
import platform
from importlib.util import find_spec
from typing import Annotated

import typer

from megatron_pp_ext.runtime.groups import loaded_nccl


def main(
    dry: Annotated[bool, typer.Option("--dry", help="CPUs stand in for a GPU.")] = False,
    tried: Annotated[
        str, typer.Option("--try", help="compile: a function; attention: Transformer Engine's fused one.")
    ] = "",
) -> None:
    """Print what is known of the device, and try what is to be tried, which raises if it does not work."""
    import torch

    if dry:
        from megatron_pp_ext import cpu

        cpu.install()
    is_there = torch.cuda.is_available()
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    nccl: tuple[int, ...] = ()
    if is_there:
        versions.append(torch.cuda.get_device_name(0))
        if torch.distributed.is_nccl_available():
            nccl = loaded_nccl() or torch.cuda.nccl.version()
            versions.append(f"NCCL {'.'.join(map(str, nccl))}")
    for name in ("megatron.core", "transformer_engine", "fused_weight_gradient_mlp_cuda"):
        versions.append(f"{name}{'' if _is_there(name) else ' absent'}")
    if tried == "compile":
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.gelu(x) * x)(x).sum().backward()
    elif tried == "attention":
        from transformer_engine.pytorch import DotProductAttention

        heads = [torch.randn(256, 1, 8, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        queries, keys, values = (head.requires_grad_() for head in heads)
        DotProductAttention(8, 32)(queries, keys, values, attn_mask_type="causal").sum().backward()
        torch.cuda.synchronize()
    print(json.dumps({"cuda": is_there, "line": ", ".join(versions), "nccl": nccl}))


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    typer.run(main)
