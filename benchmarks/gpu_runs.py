"""Training runs and rehearsals on one GPU; parts of benchmarks/gpu.py."""

import json
import re
import shlex
import tempfile
from pathlib import Path

from gpu import Bench, implementation
from published_runs import LLAMA
from tables import Row, table

LOSS = re.compile(r"lm loss: (\S+)")
PARITY_STEPS = 20
FURTHEST = 1e-2
"""How far a loss of ``parity`` may be from the baseline's, relative.

Up to its first update every schedule runs the same kernels in the same order, so first losses are equal.
Later a clipped update (the norm is summed rank by rank) or an attention that adds atomically changes the last
bits of gradients, some weights round to the other bf16, and losses drift apart.  On a CPU, where this model
trained twenty steps with last bits changed so in every step, by up to 3e-3; with the gradients of one of its
matrices left out, by up to 4e-2.
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
    """Losses of all schedules from one checkpoint on, against stock's 1F1B.

    Where messages pass through the host, stock's schedule cannot send them, and the baseline is our 1F1B.
    RuntimeError, with the table, if a first loss is not printed as the baseline's, or a later one is further
    from it than ``FURTHEST``.
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
                raise RuntimeError(f"{name} told {len(losses)} losses of {PARITY_STEPS}")
            expected = expected or losses
            apart = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
            rows.append((name, losses[0], losses[-1], "equal" if losses == expected else f"{max(apart):.1e}"))
            if losses[0] != expected[0] or not all(one <= FURTHEST for one in apart):  # nan is neither
                wrong.append(name)
    head = ("schedule", "first loss", "last loss", f"largest relative difference in {PARITY_STEPS} steps")
    told = f"## Losses from one checkpoint on, p = 4 on one device\n\n{table(head, rows)}"
    if wrong:
        raise RuntimeError(
            f"{', '.join(wrong)} trained otherwise than the baseline: first losses must be equal as printed, "
            f"all within {FURTHEST:g}\n\n{told}"
        )
    return told


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
    """A step of Llama2-7B at p = 8 from the first, a middle and the last rank, and their peaks."""
    from importlib.util import find_spec

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
    rows: list[Row] = []
    first = None
    for name, chosen in runs.items():
        flags = [*model, *chosen.split()]
        files = {kind: bench.out / f"{kind}-{name.split()[0]}.json" for kind in ("rehearsal", "estimate")}
        words = ["rehearse", "--ranks", "first,middle,last", "--iterations", iterations]
        bench.mpp(f"rehearse-{name.split()[0]}", [*words, "--json", str(files["rehearsal"]), "--", *flags])
        words = ["estimate", "--system", "h200", "--margin", "0", "--json", str(files["estimate"])]
        bench.mpp(f"estimate-{name.split()[0]}", [*words, "--", *flags])
        rehearsed, estimated = (json.loads(Path(file).read_text()) for file in files.values())
        seconds = rehearsed["step_seconds"]
        first = first or seconds
        used = estimated["utilisation"] * estimated["step_seconds"] / seconds
        published = f"{PUBLISHED[name] / PUBLISHED['1f1b']:.3f}" if name in PUBLISHED else ""
        rows.append(
            (
                name,
                f"{seconds:.3f}",
                f"{sequence * MICROBATCHES / seconds / RANKS:.0f}",
                f"{used:.1%}",
                f"{first / seconds:.3f}",
                published,
                _peaks(rehearsed["device_bytes"], estimated["ranks"]),
            )
        )
    head = (
        "schedule", "step s", "tokens/s a GPU", "MFU", "of 1F1B's", "published",
        "peak GiB of a rank (against the memory model)",
    )  # fmt: skip
    about = f"Llama2-7B, {sequence} tokens, m = {MICROBATCHES}; messages and collectives take no time."
    return f"## Rehearsed steps at p = {RANKS}\n\n{about}\n\n{table(head, rows)}"


def _peaks(measured: dict[str, int | None], ranks: list[dict[str, float]]) -> str:
    """By rank: what the device's allocator had at most, and how far the model's bytes are from it."""
    told = []
    for rank, peak in measured.items():
        predicted = sum(ranks[int(rank)].values())
        told.append(f"{rank}: {peak / 2**30:.1f} ({predicted / peak - 1:+.1%})" if peak else f"{rank}: -")
    return ", ".join(told)
