"""What needs a GPU: parity over real devices, memory, the cost of a split backward, rehearsals, gaps.

    python -m benchmarks.gpu.check [--out FOLDER] [--parts split,gaps,parity,rehearse] [--dry]

Each part runs in processes of its own and writes logs.  A part that fails does not stop the others, but the
exit status is 1 then.  Writes FOLDER/gpu.md and prints it.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.bench import Bench, machine, nccl_shares_a_gpu
from benchmarks.report import RESULTS, publish

PARTS = ("split", "gaps", "parity", "rehearse")


def main(
    out: Annotated[Path, typer.Option(help="A folder for logs and tables.")] = RESULTS / "gpu",
    parts: Annotated[str, typer.Option(help="The parts to run.")] = ",".join(PARTS),
    dry: Annotated[bool, typer.Option("--dry", help="Try the script on a CPU, with tiny models.")] = False,
) -> None:
    """Run the parts one after the other and write the tables."""
    import torch

    from benchmarks.gpu import layers, runs

    if not dry and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu.check needs a CUDA device; --dry tries the script itself on a CPU")
    known = {"split": layers.split, "gaps": layers.gaps, "parity": runs.parity, "rehearse": runs.rehearse}
    wanted = parts.split(",")
    if unknown := [part for part in wanted if part not in known]:
        raise SystemExit(f"--parts takes {', '.join(known)}, got {', '.join(unknown)}")
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, dry, "nccl" if not dry and nccl_shares_a_gpu() else "gloo")
    about = f"With {machine()}; ranks that share the device communicate over {bench.backend}."
    text: list[str] = []
    failed = False
    for part in wanted:
        start = time.monotonic()
        try:
            text.append(known[part](bench))
        except RuntimeError as error:
            failed = True
            text.append(f"## {part}\n\nfailed: {error}")
        print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        publish(out / "gpu.md", "On a GPU", about, *text)
    print((out / "gpu.md").read_text(encoding="utf-8"))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
