"""How the parts of the GPU check start runs: ranks that share the device, with a log for each run."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measuring import MPP, call
from megatron_pp_ext.jobs import command

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Lets NCCL (2.29 or newer) open communicators of several ranks on one device."""


@dataclass
class Bench:
    """The folder of the logs, and how runs are started; ``dry`` runs are tiny and on the CPU."""

    out: Path
    dry: bool
    backend: str = "gloo"

    def pretrain(self, name: str, ranks: int, flags: list[str], seconds: float = 150) -> str:
        """Train on ranks that share the GPU, and return the log; RuntimeError if that fails or hangs."""
        if self.dry:
            words = command.training(flags, ranks, cpu=True)
        else:
            module = ["-m", "benchmarks.gpu.shared_device", "--distributed-backend", self.backend]
            words = [*command.torchrun(ranks), *module, *flags]
        return self._run(name, words, seconds)

    def mpp(self, name: str, words: list[str], seconds: float = 150) -> str:
        """Run a command of ``mpp`` and return its output; RuntimeError if that fails or hangs."""
        return self._run(name, [*MPP, *words], seconds)

    def _run(self, name: str, words: list[str], seconds: float) -> str:
        return call(words, self.out / f"{name}.log", seconds, SHARED)


def implementation() -> list[str]:
    """Return the flags for the layers and kernels that are installed."""
    found = ["--no-persist-layer-norm", "--no-rope-fusion", "--disable-jit-fuser"]
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        found.append("--no-gradient-accumulation-fusion")
    if find_spec("transformer_engine") is None:
        found += [
            "--transformer-impl",
            "local",
            "--attention-backend",
            "unfused",
            "--no-masked-softmax-fusion",
        ]
    return found


def nccl_shares_a_gpu() -> bool:
    """Return whether two ranks may open NCCL communicators on one device."""
    probe = (
        "import os, torch, torch.distributed as d; torch.cuda.set_device(0); d.init_process_group('nccl'); "
        "t = torch.ones(1, device='cuda'); d.all_reduce(t); assert t.item() == 2"
    )
    python = command.torchrun(2)
    try:
        call([*python, "--no-python", python[0], "-c", probe], timeout=60, environment=SHARED)
    except RuntimeError:
        return False
    return True


def machine() -> str:
    """Return the device and the packages that matter, in a line."""
    import torch

    versions = [f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        versions += [torch.cuda.get_device_name(0), f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    for name in ("megatron.core", "transformer_engine", "fused_weight_gradient_mlp_cuda"):
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:
            is_there = False
        versions.append(f"{name}{'' if is_there else ' absent'}")
    return ", ".join(versions)
