"""Training runs and rehearsals on one GPU: parity of losses, steps and memory."""

import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec

from benchmarks.gpu.bench import UNCOMPILED, Bench
from benchmarks.gpu.rows import FAILED, Cells, Rows
from benchmarks.measuring import COMMON, MADE_UP, MPP
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
DATA = [*MADE_UP, "--distributed-timeout-minutes", "3"]
SMALL = COMMON + shlex.split(
    "--pipeline-model-parallel-size 4 --hidden-size 256 --vocab-size 1000 --global-batch-size 8"
)
BASELINE = "1f1b"
SCHEDULES = {
    name: f"--pipeline-schedule {name}"
    for name in (BASELINE, "v-half", "zb-h1", "v-min", "v-zb", "interleaved")
} | {"flex": "--pipeline-schedule flex --pipeline-memory-limit 0.75"}
"""The rehearsed schedules, the most telling first."""

COMPARED = {name: SCHEDULES[name] for name in ("v-half", "zb-h1", "v-min", "v-zb")}
"""The schedules that ``parity`` compares with 1F1B."""

RANKS_OF_PARITY = 4

TINY = "--num-layers 16 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"

COMMANDS = {
    "rehearse": ["--ranks", "first,middle,last", "--iterations", "3", "--accept-noise"],
    "estimate": ["--system", "h100", "--margin", "0"],
}


def parity(bench: Bench, rows: Rows) -> None:
    """Add the losses of each schedule from one checkpoint on, against those of 1F1B."""
    compare(bench, rows, "parity", [], COMPARED)


def compare(
    bench: Bench,
    rows: Rows,
    part: str,
    part_flags: Sequence[str],
    compared: Mapping[str, str],
    logged: str = "",
    is_rounded: bool = False,
) -> None:
    """Add the losses of the small GPT with ``part_flags`` from one checkpoint on, against those of 1F1B.

    ``compared`` has further flags by the name of the row.  Where messages pass through the host, stock's
    schedule cannot send them, and our 1F1B is the baseline.  A row fails if its first loss differs from the
    baseline's as printed, unless sums are ``is_rounded`` otherwise, or any one by more than ``FURTHEST``.  It
    also fails unless its log has ``logged``, a pattern, and shows what the pattern's group finds.
    """
    stock = bench.backend == "nccl"
    baseline = "" if stock else "--pipeline-schedule 1f1b"
    length = ["--train-iters", str(1 + PARITY_STEPS), "--ckpt-format", "torch_dist"]
    flags = [*SMALL, *DATA, *bench.implementation(), "--bf16", *length, *part_flags]
    expected: list[float] = []
    with tempfile.TemporaryDirectory() as folder:

        def save() -> Cells:
            once = ["--save", folder, "--save-interval", "1", "--exit-interval", "1"]
            bench.pretrain(f"{part}-checkpoint", RANKS_OF_PARITY, [*flags, *once, *baseline.split()])
            return {}

        def train(name: str, chosen: str) -> Cells:
            log = bench.pretrain(
                f"{part}-{name}", RANKS_OF_PARITY, [*flags, "--load", folder, *chosen.split()]
            )
            losses = [float(loss) for loss in LOSS.findall(log)]
            if len(losses) != PARITY_STEPS:
                raise RuntimeError(f"it logged {len(losses)} losses of {PARITY_STEPS}")
            expected.extend(losses if name == BASELINE else [])
            cells = _compared(losses, expected, is_rounded)
            if logged and name != BASELINE:
                match = re.search(logged, log)
                missing = {FAILED: f"its log has no {logged!r}"}
                cells = {**cells, "logged": match[1]} if match else {**missing, **cells}
            return cells

        if not rows.measure("checkpoint", save, always=True):
            return
        rows.measure(BASELINE, partial(train, BASELINE, baseline), always=True)
        for name, chosen in compared.items():
            rows.measure(name, partial(train, name, chosen))


def _compared(losses: list[float], expected: list[float], is_rounded: bool = False) -> Cells:
    """Return how far ``losses`` are from those of the baseline, of which there are none if it failed."""
    cells = {"first loss": losses[0], "last loss": losses[-1]}
    if not expected:
        return {**cells, FAILED: "there is no baseline to compare with"}
    apart = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
    difference = "equal" if losses == expected else f"{max(apart):.1e}"
    cells = {**cells, f"largest relative difference in {PARITY_STEPS} steps": difference}
    is_first = is_rounded or losses[0] == expected[0]
    if not is_first or not all(distance <= FURTHEST for distance in apart):  # nan is neither
        return {
            **cells,
            FAILED: "it trained otherwise than the baseline: first losses must be equal as printed, all "
            f"within {FURTHEST:g}",
        }
    return cells


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


def rehearse(bench: Bench, rows: Rows) -> None:
    """Add the rehearsed step of Llama2-7B at p = 8 under each schedule, with its peaks on the ranks that ran.

    Messages and collectives take no time.
    """
    sequence = 64 if bench.dry else 4096 if find_spec("transformer_engine") else 2048
    model = [*_llama(sequence), *DATA, *bench.implementation()]
    if bench.dry:
        model += shlex.split(TINY)
    seconds: dict[str, float] = {}

    @cache
    def environment() -> Mapping[str, str]:
        """Steps are compiled as training's are, where that works."""
        return {} if bench.works("compile") else UNCOMPILED

    def step(name: str) -> Cells:
        outputs = {}
        for command, options in COMMANDS.items():
            file = bench.logs / f"{command}-{name}.json"
            words = [command, *options, "--json", str(file), "--", *model, *SCHEDULES[name].split()]
            bench.run(f"{command}-{name}", [*MPP, *words], environment())
            outputs[command] = json.loads(file.read_text(encoding="utf-8"))
        rehearsed, estimated = outputs["rehearse"], outputs["estimate"]
        seconds[name] = step_seconds = rehearsed["step_seconds"]
        return {
            "step s": step_seconds,
            "tokens/s a GPU": f"{sequence * MICROBATCHES / step_seconds / RANKS:.0f}",
            "MFU": f"{estimated['utilisation'] * estimated['step_seconds'] / step_seconds:.1%}",
            "of 1F1B's speed": f"{seconds[BASELINE] / step_seconds:.3f}" if BASELINE in seconds else "",
            "published": f"{PUBLISHED[name] / PUBLISHED[BASELINE]:.3f}" if name in PUBLISHED else "",
            "peak GiB of a rank (against the memory model)": _peaks(
                rehearsed["device_bytes"], estimated["ranks"]
            ),
            "disturbed": rehearsed["disturbed"],
        }

    for name in SCHEDULES:
        rows.measure(name, partial(step, name))


def _peaks(measured: dict[str, int | None], ranks: list[dict[str, float]]) -> str:
    """Return each rank's peak of the device's allocator, and how far the memory model is from it."""
    peaks = []
    for rank, peak in measured.items():
        predicted = sum(ranks[int(rank)].values())
        peaks.append(f"{rank}: {peak / 2**30:.1f} ({predicted / peak - 1:+.1%})" if peak else f"{rank}: -")
    return ", ".join(peaks)
