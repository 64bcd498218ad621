"""How several ranks use one device: over NCCL where it lets them, and otherwise through the host."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.gpu.bench import Bench
from megatron_pp_ext.jobs import command, process

FIRST_NCCL = (2, 30)
"""The first release of NCCL that can open communicators of several ranks on one device.

2.30.3 and 2.30.7 have NCCL_MULTI_RANK_GPU_ENABLE, 2.28.9 and 2.29.7 do not.
"""

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Lets NCCL do so; a multicast of NVLink has no place for two ranks of a device."""

CONTROL = "nvidia-cuda-mps-control"
"""Lets kernels of several processes run at once.

Without it the device switches between processes, and a kernel that waits for another rank's uses up its time.
"""

PROBE = (
    "import torch, torch.distributed as d; torch.cuda.set_device(0); d.init_process_group('nccl'); "
    "t = torch.ones(1, device='cuda'); d.all_reduce(t); assert t.item() == 2; d.destroy_process_group()"
)


@contextmanager
def shared_device(bench: Bench) -> Iterator[None]:
    """Find out what carries messages between ranks on one device, and let ``bench`` use it in the context."""
    before = bench.backend, bench.environment
    try:
        if bench.nccl >= FIRST_NCCL:
            for mps in [True, False] if shutil.which(CONTROL) else [False]:
                with _multi_process_service(bench.logs) if mps else nullcontext({}) as environment:
                    bench.backend, bench.environment = "nccl", {**SHARED, **environment}
                    if _works(bench, f"sharing{'-mps' * mps}"):
                        yield
                        return
                bench.backend, bench.environment = before
        yield
    finally:
        bench.backend, bench.environment = before


def _works(bench: Bench, name: str) -> bool:
    python = command.torchrun(2)
    try:
        bench.run(name, [*python, "--no-python", python[0], "-c", PROBE])
    except RuntimeError:
        return False
    return True


@contextmanager
def _multi_process_service(logs: Path) -> Iterator[Mapping[str, str]]:
    """Run CUDA's multi-process service in the context, and yield the variables that its clients need."""
    folder = logs / "mps"
    folder.mkdir(exist_ok=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    with (
        (logs / "mps.log").open("wb") as output,
        process.started([shutil.which(CONTROL) or CONTROL, "-f"], output, environment),
    ):
        yield environment
