"""How the parts of the GPU check start runs, each with a log, in the time that the part has."""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measuring import call
from megatron_pp_ext.jobs import command, process

UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Keeps torch.compile out of a run.

Megatron's --disable-jit-fuser does not: it comes when the functions have been decorated, at their import.
"""

LEAST_SECONDS = 5.0
"""With less time left nothing is started any more."""


class NoTimeLeft(RuntimeError):
    """A part has used up its seconds."""


@dataclass
class Bench:
    """Where logs go and how runs are started; ``dry`` runs are tiny and on CPUs that stand in for a GPU.

    ``nccl`` is the version of the device's NCCL.  ``backend`` carries the messages of ranks that share the
    device, and ``environment`` is what they need for that.
    """

    logs: Path
    dry: bool
    nccl: tuple[int, ...] = ()
    backend: str = "gloo"
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin(90)

    def begin(self, seconds: float) -> None:
        """Give all runs from now on ``seconds`` together."""
        self.seconds, self.until = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def require_time(self) -> None:
        """Raise NoTimeLeft if too little time is left for another run."""
        if self.left() < LEAST_SECONDS:
            raise NoTimeLeft(f"not run: the {self.seconds:.0f} s of this part were over")

    def pretrain(self, name: str, ranks: int, flags: Sequence[str]) -> str:
        """Train on ranks that share the device, uncompiled, and return the log; errors as ``run``."""
        module = ["-m", "benchmarks.gpu.shared_device", *["--cpu"] * self.dry]
        words = [*command.torchrun(ranks), *module, "--distributed-backend", self.backend, *flags]
        return self.run(name, words, UNCOMPILED)

    def module(self, name: str, module: str, *words: str) -> dict[str, Any]:
        """Run a module of this folder and return the JSON at the end of its output; errors as ``run``."""
        output = self.run(name, [sys.executable, "-m", module, *words, *["--dry"] * self.dry])
        cells: dict[str, Any] = json.loads(output.splitlines()[-1])
        return cells

    def ranks(self, name: str, ranks: int, module: str, *words: str) -> dict[str, Any]:
        """Run a module on ``ranks`` ranks; return and errors as ``module``."""
        started = [*command.torchrun(ranks), "-m", module, *words, *["--dry"] * self.dry]
        cells: dict[str, Any] = json.loads(self.run(name, started, UNCOMPILED).splitlines()[-1])
        return cells

    def works(self, feature: str) -> bool:
        """Return whether ``what`` works here: "compile", which takes a compiler of C, or "attention"."""
        try:
            self.module(feature, "benchmarks.gpu.machine", "--try", feature)
        except NoTimeLeft:
            raise
        except RuntimeError:
            return False
        return True

    def implementation(self) -> list[str]:
        """Return the flags for the layers and kernels that are installed, and work."""
        flags = ["--no-persist-layer-norm", "--no-rope-fusion"]
        if find_spec("fused_weight_gradient_mlp_cuda") is None:
            flags.append("--no-gradient-accumulation-fusion")
        if find_spec("transformer_engine") is None:
            flags += shlex.split("--transformer-impl local --no-masked-softmax-fusion")
        elif self.works("attention"):
            return flags
        return [*flags, "--attention-backend", "unfused"]

    def run(self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a command and return its output.

        Raises RuntimeError if it fails, or has not ended in half of the part's seconds or the rest of
        them: a run that hangs leaves time for others.
        """
        self.require_time()
        variables = {**self.environment, **(environment or {})}
        return call(words, self.logs / f"{name}.log", min(self.seconds / 2, self.left()), variables)

    def lines(self, name: str, words: Sequence[str]) -> Iterator[str]:
        """Run a command and yield each line that it prints, when it is printed.

        Raises RuntimeError if it fails, or has not ended in the time that the part has left.
        """
        self.require_time()
        log = self.logs / f"{name}.log"
        environment = {**self.environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        with (
            log.open("wb") as output,
            log.open(encoding="utf-8", errors="replace") as reading,
            process.started(words, output, environment) as running,
        ):
            line = ""
            while True:
                # What was printed before the end is read after it.
                is_over = running.poll() is not None
                line += reading.readline()
                if self.left() < 0:
                    raise RuntimeError(f"not done after {self.seconds:.0f} s, see {log}")
                if line.endswith("\n"):
                    yield line.rstrip("\n")
                    line = ""
                elif is_over:
                    break
                else:
                    time.sleep(0.1)
            if line:
                yield line
            if running.returncode:
                raise RuntimeError(f"status {running.returncode}, see {log}")
