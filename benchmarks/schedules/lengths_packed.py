"""What do packing by cost and the number of microbatches change?  Writes results/lengths_packed.md.

    python -m benchmarks.schedules.lengths_packed

Documents are packed as Megatron's ``dp_balanced`` does, up to a number of tokens in the order in which they
come, and by ``pack_by_cost``.  One process, no GPU; a minute or two on one core.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from benchmarks.schedules.lengths import WINDOWS, distribution
from megatron_pp_ext.features.units.comparison import PackedSteps
from megatron_pp_ext.features.units.packing import Groups, Packing
from megatron_pp_ext.features.units.rates import EQUAL_AT, OVERHEAD

SCHEDULES = "1f1b", "interleaved", "v-zb"
MICROBATCHES = 16


def in_order(lengths: Sequence[int], most_tokens: int, replicas: int) -> Groups:
    """Return documents packed as Megatron's packer does; documents of full packs fill up the last row."""
    packs: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if packs[-1] and sum(lengths[document] for document in packs[-1]) + length > most_tokens:
            packs.append([])
        packs[-1].append(number)
    while len(packs) % replicas:
        packs.append([next(pack for pack in reversed(packs) if len(pack) > 1).pop()])
    return [packs[first : first + replicas] for first in range(0, len(packs), replicas)]


def main(
    out: Out = RESULTS / "lengths_packed.md",
    files: Annotated[
        Path | None, typer.Option(help="A folder with the whole lists.", metavar="FOLDER")
    ] = None,
    ranks: int = 8,
    replicas: int = 4,
    trials: int = 3,
) -> None:
    """Compare, and write the table."""
    rows = list[Row]()
    for name, window in WINDOWS.items():
        lengths = distribution(name, files)
        for schedule in SCHEDULES:
            samples = defaultdict[str, list[float]](list)
            for seed in range(trials):
                random, documents = np.random.default_rng(seed), list[int]()
                while sum(documents) < replicas * MICROBATCHES * window:
                    documents.append(int(random.choice(lengths)))
                steps = PackedSteps(documents, schedule, ranks, None, EQUAL_AT, OVERHEAD)
                stock_packs = in_order(documents, window, replicas)
                begin = time.process_time()
                chosen = Packing(schedule, ranks, None, window).balanced(stock_packs, documents, replicas)
                samples["seconds"].append(time.process_time() - begin)
                before, after = (
                    steps.seconds([[group[replica] for group in groups] for replica in range(replicas)])
                    for groups in (stock_packs, chosen)
                )
                samples["documents"].append(len(documents))
                samples["Megatron's microbatches"].append(len(stock_packs))
                samples["chosen"].append(len(chosen))
                samples["step"].append(after / before - 1)
            mean = {column: sum(values) / len(values) for column, values in samples.items()}
            counts = (f"{mean[column]:.0f}" for column in ("documents", "Megatron's microbatches", "chosen"))
            rows.append((name, schedule, *counts, f"{mean['step']:+.1%}", f"{mean['seconds']:.2f}"))
    about = (
        f"Means of {trials} draws for {ranks} ranks and {replicas} replicas, microbatches ordered by rule, "
        f"each of which costs {OVERHEAD:.0f} tokens on top of its own."
    )
    head = (
        "lengths",
        "schedule",
        "documents",
        "Megatron's microbatches",
        "chosen",
        "step of the slowest replica",
        "seconds of a core to choose",
    )
    publish(out, "Packing by cost", about, table(head, rows))


if __name__ == "__main__":
    typer.run(main)
