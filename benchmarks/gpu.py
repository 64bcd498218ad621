"""What a GPU is needed for: parity over real devices, memory, the cost of a cut backward, rehearsals, gaps.

    python benchmarks/gpu.py [--out benchmarks/results/gpu] [--parts split,gaps,parity,rehearse] [--dry]

Each part runs in processes of its own and writes a log; a part that fails says so and leaves the others
alone, and the exit status is 1 then.  Writes OUT/gpu.md and prints it.  ``--dry`` tries the script itself
on a CPU, with tiny models.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent


@dataclass
class Bench:
    """Where the logs go, and how commands are run."""

    out: Path
    dry: bool
    backend: str = "gloo"
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, name: str, words: list[str], seconds: float) -> str:
        """Run a command, keep what it says in NAME.log and return it; RuntimeError if it fails or hangs."""
        log = self.out / f"{name}.log"
        try:
            run = subprocess.run(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=seconds,
                env={**os.environ, **self.environment},
            )
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
            log.write_text(said if isinstance(said, str) else said.decode(errors="replace"))
            raise RuntimeError(f"not done after {seconds:.0f} s, see {log}") from error
        log.write_text(run.stdout)
        if run.returncode:
            raise RuntimeError(f"status {run.returncode}, see {log}")
        return run.stdout

    def pretrain(self, name: str, ranks: int, flags: list[str], seconds: float = 150) -> str:
        """A training run whose ranks share the GPU."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
        if self.dry:
            script = ["-m", "megatron_pp_ext.pretrain_gpt", "--cpu"]
        else:
            script = [str(HERE / "one_gpu.py"), "--distributed-backend", self.backend]
        return self.call(name, [*launcher, *script, *flags], seconds)

    def mpp(self, name: str, words: list[str], seconds: float = 150) -> str:
        """A command of ``mpp``."""
        run = [sys.executable, "-c", "from megatron_pp_ext.cli import app; app()"]
        return self.call(name, [*run, *words], seconds)


def implementation() -> list[str]:
    """Flags for the layers and kernels that are installed."""
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
    """Whether two ranks may open NCCL communicators on one device (NCCL 2.29 or newer, if asked)."""
    probe = (
        "import os, torch, torch.distributed as d; torch.cuda.set_device(0); d.init_process_group('nccl'); "
        "t = torch.ones(1, device='cuda'); d.all_reduce(t); assert t.item() == 2"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    try:
        run = subprocess.run(
            [*launcher, "--no-python", sys.executable, "-c", probe],
            capture_output=True,
            check=False,
            timeout=60,
            env={**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def machine() -> str:
    """Device, driver side and packages, in a line."""
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
    return f"{platform.machine()}, {', '.join(versions)}"


def main(
    out: Annotated[Path, typer.Option(help="A folder for logs and tables.")] = HERE / "results" / "gpu",
    parts: Annotated[str, typer.Option(help="Which ones.")] = "split,gaps,parity,rehearse",
    dry: Annotated[bool, typer.Option(help="Try the script on a CPU, with tiny models.")] = False,
) -> None:
    """Run the parts one after the other and write the tables."""
    import gpu_layers
    import gpu_runs
    import torch

    if not dry and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; --dry tries the script itself on a CPU")
    known: dict[str, Callable[[Bench], str]] = {
        "parity": gpu_runs.parity,
        "split": gpu_layers.split,
        "rehearse": gpu_runs.rehearse,
        "gaps": gpu_layers.gaps,
    }
    wanted = parts.split(",")
    if unknown := [part for part in wanted if part not in known]:
        raise SystemExit(f"--parts knows {', '.join(known)}, got {', '.join(unknown)}")
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, dry, environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    if not dry and nccl_shares_a_gpu():
        bench.backend = "nccl"
    text = [
        "# On a GPU",
        f"`python benchmarks/gpu.py --parts {parts}{' --dry' if dry else ''}` on {machine()}, "
        f"{datetime.now(UTC):%Y-%m-%d}. Ranks that share the device talk over {bench.backend}.",
    ]
    failed = False
    for part in wanted:
        start = time.monotonic()
        try:
            text.append(known[part](bench))
        except RuntimeError as error:
            failed = True
            text.append(f"## {part}\n\nfailed: {error}")
        print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        (out / "gpu.md").write_text("\n\n".join(text) + "\n")
    print("\n\n".join(text))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
