"""What do the measured numbers of each step cost the host?  (a small GPT on two CPU ranks, gloo)

    python -m benchmarks.runtime.step_log [--pairs 200]

One process trains on by V-Half, and every second step is timed for the log, as with --no-pipeline-log and
without.  In each pair of neighbours the timed step comes first or second by turns.  Writes
results/step_log.md.
"""

import gc
import time
from contextlib import nullcontext
from statistics import median, quantiles
from typing import Annotated, NamedTuple

import torch.distributed as dist
import typer

from tests.support.ranks import run_ranks  # before Megatron: installs the stand-ins for torch.cuda

# isort: split
import megatron_pp_ext
from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.runtime.machine import pin_to_core
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.runtime.rank import Recorder, Unrecorded
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.schedule.actions import Action, Kind
from tests.support import own_loop

RANKS, MICROBATCHES, CHUNKS = 2, 8, 2
SIZES = {"hidden 16, 8 tokens": (16, 8), "hidden 128, 128 tokens": (128, 128)}
"""The hidden size and the tokens of a microbatch: of nearly nothing but the host's work, and of some more."""

RECORDED, ROUNDS = 1000, 200
"""The actions without any work of a round, to measure their recording alone, and the rounds."""


class Cost(NamedTuple):
    """What a rank measured: seconds of pairs of steps, timed and not, and of calls of ``metrics``.

    The processor seconds are those of the rank's thread.
    """

    pairs: list[tuple[float, float]]
    processor_pairs: list[tuple[float, float]]
    calls: list[float]


def measure(rank: int, hidden: int, tokens: int, pairs: int) -> Cost:
    """Train on a rank that is bound to a core; the first steps, in which bytes are counted, are left out."""
    pin_to_core(rank)
    own_loop.HIDDEN, own_loop.LENGTH = hidden, tokens
    own_loop.start(RANKS)
    with megatron_pp_ext.installed("v-half", ranks=RANKS, microbatches=MICROBATCHES) as in_force:
        pipeline, model = requested.require(), own_loop.build(CHUNKS)
    iterators = [own_loop.batches((tokens,)) for _ in model]

    def step(is_timed: bool) -> tuple[float, float]:
        pipeline.last_step.is_wanted = is_timed
        dist.barrier()
        start, worked = time.perf_counter(), time.thread_time()
        own_loop.run_step(model, iterators, MICROBATCHES, seq_length=tokens)
        return time.perf_counter() - start, time.thread_time() - worked

    for is_timed in (True, False, True, False):
        step(is_timed)
    gc.collect()
    gc.freeze()  # the collector need not look through imported modules within a step
    cost = Cost([], [], [])
    for number in range(pairs):
        by_kind = {}
        for is_timed in (True, False) if number % 2 else (False, True):
            by_kind[is_timed] = step(is_timed)
            if is_timed and number % 10 == 0:
                dist.barrier()
                start = time.perf_counter()
                in_force.metrics()
                cost.calls.append(time.perf_counter() - start)
        (timed, timed_worked), (plain, plain_worked) = by_kind[True], by_kind[False]
        cost.pairs.append((timed, plain))
        cost.processor_pairs.append((timed_worked, plain_worked))
    return cost


def microseconds_of_recording(recorder: Recorder) -> float:
    """Return the microseconds of an action that does nothing: the least of ``ROUNDS`` means."""
    action, timer = Action(0, Kind.W, 0), recorder if isinstance(recorder, StepRecorder) else None
    means = []
    for _ in range(ROUNDS):
        if timer is not None:
            timer.forget()
        with timer.step(metered=False) if timer is not None else nullcontext():
            start = time.perf_counter()
            for _ in range(RECORDED):
                with recorder.during(action):
                    pass
            means.append((time.perf_counter() - start) / RECORDED)
    return 1e6 * min(means)


def row_of(what: str, pairs: list[tuple[float, float]]) -> Row:
    """Return the medians, and the ratio of pairs with its quartiles."""
    timed, plain = zip(*pairs, strict=True)
    low, middle, high = quantiles((first / second for first, second in pairs), n=4)
    return (
        what,
        f"{1e3 * median(plain):.2f}",
        f"{1e3 * median(timed):.2f}",
        f"{middle:.4f}",
        f"{low:.3f} to {high:.3f}",
        f"{1e6 * median(first - second for first, second in pairs):.0f}",
    )


def main(
    out: Out = RESULTS / "step_log.md",
    pairs: Annotated[int, typer.Option(help="Pairs of steps of each size.")] = 200,
) -> None:
    """Measure and write the page."""
    actions = 3 * CHUNKS * MICROBATCHES
    steps: list[Row] = []
    for name, sizes in SIZES.items():
        ranks = run_ranks(measure, RANKS, *sizes, pairs, timeout=3600)
        for rank, cost in enumerate(ranks):
            steps.append(row_of(f"{name}, rank {rank}, wall clock", cost.pairs))
            steps.append(row_of(f"{name}, rank {rank}, processor time", cost.processor_pairs))
        calls = [call for cost in ranks for call in cost.calls]
        steps.append((f"{name}, a call of `metrics`", "", f"{1e3 * median(calls):.2f}", "", "", ""))
    publish(
        out,
        "What the numbers of a step cost the host",
        f"p = {RANKS}, m = {MICROBATCHES}, v-half: at most {actions} actions a rank in a step. {pairs} pairs "
        "of steps, timed and not, in one process; ratios are medians of pairs with their quartiles.",
        "## An action\n\n"
        + table(
            ["recording", "us"],
            [
                ("with the log", f"{microseconds_of_recording(StepRecorder(waits=False)):.2f}"),
                ("without", f"{microseconds_of_recording(Unrecorded()):.2f}"),
            ],
        ),
        "## A step\n\n"
        + table(["what", "without ms", "with ms", "with / without", "quartiles", "difference us"], steps),
    )


if __name__ == "__main__":
    typer.run(main)
