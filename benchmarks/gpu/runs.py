"""Training runs and rehearsals on one GPU: parity of losses, steps and memory."""

import json
import re
import shlex
import tempfile
from importlib.util import find_spec

from benchmarks.gpu.bench import Bench, implementation
from benchmarks.report import Row, table
from reference.published_runs import LLAMA

LOSS = re.compile(r"lm loss: (\S+)")
PARITY_STEPS = 20
FURTHEST = 1e-2
"""The largest relative difference of a loss of ``parity`` from the baseline's.

Up to its first update every schedule runs the same kernels in the same order, so first losses are equal.
Later a clipped update (the norm is summed rank by rank) or an attention that adds atomically changes the last
bits of gradients, some weights round to the other bf16, and losses drift apart.  On a CPU this model trained
twenty steps with its last bits changed so in every step: losses differed by up to 3e-3, and by up to 4e-2
with the gradients of one of its matrices left out.
"""
DATA = shlex.split(
    "--attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 1 --mock-data --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--distributed-timeout-minutes 3"
)
SMALL = shlex.split(
    "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 256 --num-attention-heads 8 "
    "--seq-length 256 --max-position-embeddings 256 --vocab-size 1000 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-3"
)
SCHEDULES = {
    "zb-h1": "--pipeline-schedule zb-h1",
    "v-min": "--pipeline-schedule v-min",
    "v-half": "--pipeline-schedule v-half",
    "v-zb": "--pipeline-schedule v-zb",
    "flex 0.75": "--pipeline-schedule flex --pipeline-memory-limit 0.75",
}


def parity(bench: Bench) -> str:
    """Return a table of the losses of all schedules from one checkpoint on, against stock's 1F1B.

    Where messages pass through the host, stock's schedule cannot send them, and the baseline is our 1F1B.
    Raises RuntimeError, with the table, if a first loss differs from the baseline's as printed, or a later
    one by more than ``FURTHEST``.
    """
    stock = bench.backend == "nccl" or bench.dry
    baseline = "" if stock else "--pipeline-schedule 1f1b"
    flags = [*SMALL, *DATA, *([] if bench.dry else implementation())]
    if not bench.dry:
        flags.append("--bf16")
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        length = ["--train-iters", str(1 + PARITY_STEPS), "--ckpt-format", "torch_dist"]
        save = ["--save", folder, "--save-interval", "1", "--exit-interval", "1"]
        bench.pretrain("parity-save", 4, [*flags, *length, *save, *baseline.split()])
        compared = {name: SCHEDULES[name] for name in ("zb-h1", "v-half", "v-zb")[: 1 if bench.dry else None]}
        runs = {"1f1b (stock)" if stock else "1f1b (ours)": baseline, **compared}
        expected: list[float] = []
        for name, chosen in runs.items():
            log = bench.pretrain(
                f"parity-{name.split()[0]}", 4, [*flags, *length, "--load", folder, *chosen.split()]
            )
            losses = [float(loss) for loss in LOSS.findall(log)]
            if len(losses) != PARITY_STEPS:
                raise RuntimeError(f"{name} logged {len(losses)} losses of {PARITY_STEPS}")
            expected = expected or losses
            apart = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
            rows.append((name, losses[0], losses[-1], "equal" if losses == expected else f"{max(apart):.1e}"))
            if losses[0] != expected[0] or not all(one <= FURTHEST for one in apart):  # nan is neither
                wrong.append(name)
    head = ("schedule", "first loss", "last loss", f"largest relative difference in {PARITY_STEPS} steps")
    section = f"## Losses from one checkpoint on, p = 4 on one device\n\n{table(head, rows)}"
    if wrong:
        raise RuntimeError(
            f"{', '.join(wrong)} trained otherwise than the baseline: first losses must be equal as printed, "
            f"all within {FURTHEST:g}\n\n{section}"
        )
    return section


PUBLISHED = {name: tokens for name, tokens, _ in LLAMA.values()}

RANKS, MICROBATCHES = 8, 32


def _llama(sequence: int) -> list[str]:
    return shlex.split(
        f"--pipeline-model-parallel-size {RANKS} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 "
        f"--num-attention-heads 32 --seq-length {sequence} --max-position-embeddings {sequence} --swiglu "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--vocab-size 32000 --position-embedding-type rope --bf16 --micro-batch-size 1 --lr 1e-4 "
        f"--global-batch-size {MICROBATCHES}"
    )


def rehearse(bench: Bench) -> str:
    """Return a table of rehearsed steps of Llama2-7B at p = 8, and peaks of the ranks that were run."""
    sequence = 4096 if find_spec("transformer_engine") else 2048
    model = [*_llama(sequence), *DATA, *implementation()]
    iterations = "3"
    if bench.dry:
        sequence, iterations = 64, "2"
        tiny = "--num-layers 16 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"
        model = [*_llama(sequence), *DATA, *tiny.split()]
        model.remove("--bf16")
    runs = {name: f"--pipeline-schedule {name}" for name in ("1f1b", "interleaved")} | SCHEDULES
    if bench.dry:
        runs = {name: runs[name] for name in ("1f1b", "v-half")}
    commands = {
        "rehearse": ["--ranks", "first,middle,last", "--iterations", iterations],
        "estimate": ["--system", "h200", "--margin", "0"],
    }
    rows: list[Row] = []
    first = None
    for name, chosen in runs.items():
        found = {}
        for command, options in commands.items():
            run = f"{command}-{name.split()[0]}"
            file = bench.out / f"{run}.json"
            bench.mpp(run, [command, *options, "--json", str(file), "--", *model, *chosen.split()])
            found[command] = json.loads(file.read_text(encoding="utf-8"))
        rehearsed, estimated = found["rehearse"], found["estimate"]
        seconds = rehearsed["step_seconds"]
        first = first or seconds
        used = estimated["utilisation"] * estimated["step_seconds"] / seconds
        published = f"{PUBLISHED[name] / PUBLISHED['1f1b']:.3f}" if name in PUBLISHED else ""
        speed = f"{sequence * MICROBATCHES / seconds / RANKS:.0f}"
        peaks = _peaks(rehearsed["device_bytes"], estimated["ranks"])
        rows.append(
            (name, f"{seconds:.3f}", speed, f"{used:.1%}", f"{first / seconds:.3f}", published, peaks)
        )
    head = (
        "schedule", "step s", "tokens/s a GPU", "MFU", "of 1F1B's", "published",
        "peak GiB of a rank (against the memory model)",
    )  # fmt: skip
    about = f"Llama2-7B, {sequence} tokens, m = {MICROBATCHES}; messages and collectives take no time."
    return f"## Rehearsed steps at p = {RANKS}\n\n{about}\n\n{table(head, rows)}"


def _peaks(measured: dict[str, int | None], ranks: list[dict[str, float]]) -> str:
    """Return each rank's peak of the device's allocator, and how far the memory model is from it."""
    found = []
    for rank, peak in measured.items():
        predicted = sum(ranks[int(rank)].values())
        found.append(f"{rank}: {peak / 2**30:.1f} ({predicted / peak - 1:+.1%})" if peak else f"{rank}: -")
    return ", ".join(found)
