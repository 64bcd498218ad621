"""Typical jobs of trainers of reinforcement learning and fine-tuning: their own step, and ours.

python -m benchmarks.planner.trainers --keep FOLDER     # minutes; writes results/trainers.md

Sizes are those of the trainers' own example scripts, which the page names.  FOLDER gets the lengths that
samples are drawn from, so that the commands on the page can be repeated, and the numbers of each command.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import typer

from benchmarks.report import RESULTS, Keep, Out, kept_in, publish, table
from megatron_pp_ext.files import write_json

_MEAN, _SIGMA, _PROMPT = 0.293, 0.8, 200
"""Answers are assumed: lognormal with this mean, as a part of the longest, and this sigma, cut at it; and the
tokens of a prompt.  docs/lengths.md has the same form."""

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_DRAWS = 4
NAMES = "zb-h1", "v-half", "v-zb", "flex", "flex, less"
"""The schedules in the columns."""

_MOST_COMPILED = 64
"""A step of more microbatches takes minutes to compile, and only one is made."""


@dataclass(frozen=True)
class Job:
    """A training step of one of a trainer's own scripts."""

    trainer: str
    script: str
    """The script in the trainer's repository."""
    model: str
    gpus: int
    samples: int
    """The samples of a step, over all replicas."""
    longest: int
    """The most tokens of an answer."""
    tokens: int
    """The most tokens of a microbatch, of all context-parallel ranks."""
    tensor: int
    pipeline: int
    context: int = 1
    experts: str = ""
    """The flags of expert parallelism."""
    ends: str = ""
    """The flags of stages with fewer layers or more."""
    more: str = _FULL
    virtual: int = 1
    order: str = "given"
    """The order that the trainer gives its microbatches, in our words."""
    is_padded: bool = False
    """Whether all microbatches of a step get one length."""
    chunks: int = 2
    """The most chunks of a rank that the trainer can train."""

    @property
    def replicas(self) -> int:
        """The data-parallel size."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        """The microbatches of a replica: full ones, as many as the samples make."""
        mean = sum(answers(self.longest)) / len(answers(self.longest))
        return ceil(self.samples * mean / self.tokens / self.replicas)


_QWEN_235B = "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1"

JOBS = (
    Job(
        "verl",
        "grpo_trainer/run_deepseek_v3_671b_megatron.sh",
        "deepseek-v3",
        96,
        256,
        8192,
        10240,
        8,
        12,
        experts="--expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
        ends="--decoder-last-pipeline-num-layers 6",
        more=f"{_FULL} --mtp-num-layers 0 --optimizer-cpu-offload --optimizer-offload-fraction 1.0 "
        "--use-precision-aware-optimizer",
        order="rule",
    ),
    Job(
        "verl",
        "grpo_trainer/run_qwen3_30b_a3b_megatron.sh",
        "qwen3-30b-a3b",
        8,
        128,
        8192,
        30720,
        4,
        2,
        experts="--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        virtual=2,
        order="rule",
    ),
    Job(
        "verl",
        "grpo_trainer/run_qwen3_8b_megatron.sh",
        "qwen3-8b",
        8,
        1280,
        2048,
        24576,
        2,
        2,
        more="",
        order="rule",
    ),
    Job(
        "NeMo-RL",
        "performance/grpo-deepseek-v3-32n8g.yaml",
        "deepseek-v3",
        256,
        512,
        1536,
        1536,
        1,
        16,
        experts="--expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
        ends="--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2",
        more=f"{_FULL} --mtp-num-layers 0",
        is_padded=True,
        chunks=1,
    ),
    Job(
        "NeMo-RL",
        "performance/grpo-qwen3-235b-16n8g.yaml",
        "qwen3-235b",
        128,
        512,
        8192,
        8192,
        2,
        8,
        2,
        experts=_QWEN_235B,
        ends="--decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11",
        is_padded=True,
        chunks=1,
    ),
    Job(
        "NeMo-RL",
        "grpo_math_70B_megatron.yaml",
        "llama3-70b",
        64,
        512,
        4096,
        4096,
        4,
        4,
        more="",
        is_padded=True,
        chunks=1,
    ),
    Job(
        "slime",
        "scripts/run-qwen3-235B-A22B.sh",
        "qwen3-235b",
        64,
        64,
        8192,
        32768,
        4,
        4,
        2,
        experts=_QWEN_235B,
        ends="--decoder-last-pipeline-num-layers 22",
    ),
    Job(
        "slime",
        "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh, in bf16",
        "qwen3-30b-a3b",
        16,
        128,
        8192,
        20480,
        1,
        4,
        experts="--expert-model-parallel-size 4",
    ),
    Job(
        "slime",
        "scripts/run-deepseek-r1.sh",
        "deepseek-v3",
        128,
        1024,
        32768,
        65536,
        8,
        4,
        4,
        experts="--expert-model-parallel-size 32 --expert-tensor-parallel-size 1",
        ends="--decoder-last-pipeline-num-layers 13",
        more=f"{_FULL} --mtp-num-layers 0",
    ),
    Job(
        "ms-swift",
        "megatron/moe/qwen3_moe.sh",
        "qwen3-30b-a3b",
        16,
        51,
        8192,
        8192,
        1,
        2,
        experts="--expert-model-parallel-size 8",
    ),
    Job(
        "ms-swift",
        "megatron/mcore_bridge/full/moe.sh",
        "qwen3-30b-a3b",
        8,
        12,
        8192,
        8192,
        4,
        2,
        experts="--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        ends="--decoder-first-pipeline-num-layers 25",
    ),
)


def answers(longest: int) -> list[int]:
    """Return 2,000 lengths of samples whose answers have at most ``longest`` tokens."""
    normal = NormalDist(log(_MEAN * longest) - _SIGMA**2 / 2, _SIGMA)
    lengths = [exp(normal.inv_cdf((place + 0.5) / 2000)) for place in range(2000)]
    return [min(longest, _PROMPT + round(length)) for length in lengths]


def schedules(job: Job) -> Mapping[str, Sequence[str]]:
    """Return the flags of each schedule by its name, the trainer's own first."""
    own = ["--pipeline-schedule", "1f1b", *job.ends.split()]
    if job.virtual > 1:
        virtual = ["--num-virtual-stages-per-pipeline-rank", str(job.virtual)]
        own = ["--pipeline-schedule", "interleaved", *virtual]
    flex = ["--pipeline-schedule", "flex", "--pipeline-memory-limit"]
    spread = ["--pipeline-model-parallel-layout", "auto"]
    steps = {"own": own, "zb-h1": ["--pipeline-schedule", "zb-h1", *job.ends.split()]}
    if job.chunks == 1:
        linear = [*job.ends.split(), "--num-virtual-stages-per-pipeline-rank", "1"]
        return steps | {"flex": [*flex, "1.0", *linear]}
    steps |= {name: ["--pipeline-schedule", name, *spread] for name in ("v-half", "v-zb")}
    steps["flex"] = [*flex, "1.0", *spread]
    if job.microbatches <= _MOST_COMPILED:
        steps["flex, less"] = [*flex, "0.6", *spread]
    return steps


def command(job: Job, flags: Sequence[str], folder: str) -> list[str]:
    """Return the command that estimates the step of ``job`` with the ``flags`` of a schedule."""
    words = ["estimate", "--no-ask", "--model", job.model, "--world-size", str(job.gpus)]
    words += ["--seq-length", str(job.tokens), "--global-batch-size", str(job.microbatches * job.replicas)]
    if not job.is_padded:
        words += ["--lengths", f"{folder}/answers_{job.longest}.json", "--draws", str(_DRAWS)]
    words += ["--", "--micro-batch-size", "1", "--tensor-model-parallel-size", str(job.tensor)]
    words += ["--pipeline-model-parallel-size", str(job.pipeline), "--use-distributed-optimizer"]
    if job.tensor > 1:
        words.append("--sequence-parallel")
    if job.context > 1:
        words += ["--context-parallel-size", str(job.context)]
    return [*words, *job.experts.split(), *job.more.split(), *flags]


@dataclass(frozen=True)
class Step:
    """The numbers of one estimate: seconds by order, and bytes of the fullest rank."""

    seconds: Mapping[str, float]
    fullest: float
    bubble: float

    def cell(self, order: str) -> str:
        """Return the seconds with ``order``, and the gigabytes."""
        return f"{self.seconds[order]:.3g}, {self.fullest / 1e9:.0f}"


def estimated(words: Sequence[str], file: Path) -> Step | None:
    """Run a command; None where nothing fits or it is refused, which is printed."""
    if not file.exists():
        at = words.index("--")
        line = [*words[:at], "--json", str(file), *words[at:]]
        program = [sys.executable, "-m", "megatron_pp_ext.cli", *line]
        result = subprocess.run(program, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"mpp {shlex.join(words)}: {result.stdout[-300:]}{result.stderr[-300:]}", file=sys.stderr)
            return None
    numbers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rest, by_length = numbers["step_seconds"] - numbers["pipeline_seconds"], numbers["by_length"]
    orders = {"given": "given", "rule": "rule", "searched": "search"}
    seconds = dict.fromkeys(orders, numbers["step_seconds"])
    if by_length:
        seconds = {name: by_length[key] + rest for name, key in orders.items()}
    return Step(seconds, max(sum(rank.values()) for rank in numbers["ranks"]), numbers["bubble"])


def row(job: Job, steps: Mapping[str, Step | None]) -> list[str]:
    """Return the cells of a job: its sizes, its own step, and ours."""
    own = steps["own"]
    assert own is not None
    sizes = f"{job.model}, {job.gpus} GPUs, p {job.pipeline}, m {job.microbatches}"
    cells = [sizes, f"`{job.script}`", f"{own.cell(job.order)}, {own.bubble:.0%}"]
    cells.append("-" if job.is_padded else own.cell("searched"))
    best = own.seconds["searched"]
    for name in NAMES:
        step = steps.get(name)
        cells.append("-" if step is None else step.cell("searched"))
        if step is not None and step.fullest <= own.fullest * 1.02:
            best = min(best, step.seconds["searched"])
    return [*cells, f"{1 - best / own.seconds[job.order]:.1%}"]


_ABOUT = (
    "Seconds of a step and GB on the fullest H100, estimated by the commands below; nothing of it was "
    "measured. The own step has its share of idle time, with equal microbatches, too. p are pipeline "
    "ranks, and m the microbatches of a replica: full ones, as many as the samples of a step make. "
    "Answers are assumed: lognormal, mean 29% of the longest, sigma 0.8. verl's own order is light-heavy- "
    "light; NeMo-RL pads all microbatches to one length; ms-swift and slime take samples as they come. "
    "Ours have the searched order. zb-h1 has the script's own stages, a V and flex have two chunks a rank "
    "and a layout that was searched for, but one chunk and the own stages under NeMo-RL. flex keeps the "
    "activations that 1F1B keeps, and flex, less 0.6 of them. A dash is what the trainer cannot train, "
    "what no limit allows, or what was left out. The gain is that of the shortest step that keeps at most "
    "2% more than the trainer's own on the fullest rank."
)


def main(
    trainers: Annotated[
        str, typer.Option(help="Names, with commas between.")
    ] = "verl,NeMo-RL,slime,ms-swift",
    workers: Annotated[int, typer.Option(help="Estimates at a time.")] = 2,
    keep: Keep = None,
    out: Out = RESULTS / "trainers.md",
) -> None:
    """Estimate every schedule of every job, and write the table."""
    names = trainers.split(",")
    jobs = [job for job in JOBS if job.trainer in names]
    with kept_in(keep) as folder:
        for longest in {job.longest for job in jobs}:
            write_json(folder / f"answers_{longest}.json", answers(longest))
        lines = [
            (job, name, command(job, flags, str(folder)))
            for job in jobs
            for name, flags in schedules(job).items()
        ]
        files = [
            folder / f"{JOBS.index(job)}_{name.replace(', ', '-').replace(' ', '-')}.json"
            for job, name, _ in lines
        ]
        with ThreadPoolExecutor(workers) as pool:
            steps = list(pool.map(estimated, (line for *_, line in lines), files))
    by_job: dict[Job, dict[str, Step | None]] = {}
    for (job, name, _), step in zip(lines, steps, strict=True):
        by_job.setdefault(job, {})[name] = step
    head = ["job", "script", "own step: s, GB, idle", "own schedule, our order", *NAMES, "gain"]
    parts = []
    for trainer in names:
        rows = [row(job, steps) for job, steps in by_job.items() if job.trainer == trainer]
        parts += [f"## {trainer}", table(head, rows)]
    commands = "\n".join(
        f"mpp {shlex.join(command(job, schedules(job)[name], 'FOLDER'))}" for job, name, _ in lines
    )
    publish(out, "Trainers", _ABOUT, *parts, f"## The commands\n\n```bash\n{commands}\n```")


if __name__ == "__main__":
    typer.run(main)
