"""What does the order of microbatches of unlike length change?  Writes results/lengths.md.

    python -m benchmarks.schedules.lengths

Steps are drawn from public distributions of document lengths (reference/lengths) and packed in the order in
which documents come.  With --files FOLDER the whole lists are drawn from, which the distributions summarise;
with --trace FILE a recorded production job is replayed, for which pandas and pyarrow must be installed.  One
process, no GPU; a minute or two on one core.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.comparison import NAMES, over_work, peak_tokens, side_by_side, timeline
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.packing import balance, partition
from megatron_pp_ext.features.units.plan import Planner, Template, in_template
from megatron_pp_ext.features.units.rates import EQUAL_AT, LengthCosts
from megatron_pp_ext.features.units.table import table_of
from megatron_pp_ext.features.units.units import whole
from megatron_pp_ext.schedule.costs import Costs, StageCosts, UnitCosts
from megatron_pp_ext.schedule.simulate import simulate

SCHEDULES = "1f1b", "interleaved", "zb-h1", "v-half", "v-zb"
LENGTHS = Path(__file__).parents[2] / "reference" / "lengths"
WINDOWS = {"wlbllm 128K": 131_072, "prolong 64K": 65_536, "rl20K": 20_480}
"""The most tokens of a document, and the tokens of a microbatch on average."""

_SLACK = 1.02
"""The capacity of a microbatch over the mean: documents are not cut to fit."""


def distribution(name: str, files: Path | None) -> Any:
    """Return the document lengths that are called ``name``, cut to their window."""
    if name == "rl20K":  # assumed, as no public run says the lengths of its answers
        logs = np.random.default_rng(1).normal(np.log(6_000) - 0.32, 0.8, 60_000)
        return np.clip(np.exp(logs), 200, 20_480).astype(int)
    short = name.split()[0]
    path = LENGTHS / f"{short}.json" if files is None else files / f"dist_{short}.json"
    lengths = np.minimum(np.array(json.loads(path.read_text(encoding="utf-8"))), WINDOWS[name])
    return lengths[lengths > 0]


def steps(name: str, files: Path | None, microbatches: int, trials: int) -> Iterator[Microbatches]:
    """Yield steps of so many ``microbatches``, always the same."""
    lengths, random = distribution(name, files), np.random.default_rng(7)
    for _ in range(trials):
        documents: list[int] = []
        while sum(documents) + (length := int(random.choice(lengths))) <= microbatches * WINDOWS[name]:
            documents.append(length)
        packed = in_order(documents, microbatches)
        if len(packed) > microbatches:
            while len(packed) > microbatches:
                packed.sort(key=sum)
                lightest = packed.pop(0)
                packed[0] = packed[0] + lightest
            random.shuffle(packed)  # type: ignore[arg-type]
        random.permutation(microbatches)
        yield Microbatches.of(packed)


def in_order(lengths: Sequence[int], microbatches: int) -> list[list[int]]:
    """Return documents in microbatches of nearly equal tokens, in the order in which they come."""
    capacity = max(*lengths, math.ceil(sum(lengths) / microbatches * _SLACK))
    packed: list[list[int]] = [[]]
    for length in lengths:
        if packed[-1] and sum(packed[-1]) + length > capacity:
            packed.append([])
        packed[-1].append(length)
    while len(packed) < microbatches:
        largest = max(range(len(packed)), key=lambda at: (len(packed[at]) > 1) * sum(packed[at]))
        half = len(packed[largest]) // 2
        packed[largest], second = packed[largest][:half], packed[largest][half:]
        packed.append(second)
    return packed


def costs_by_length(ranks: int, chunks: int) -> LengthCosts:
    """Return costs of equal stages: F = t + q, I = t + 2.5 q, W = t, for t tokens and q squares / 24,576."""
    return LengthCosts.with_attention(Costs.per_rank(ranks, chunks), 1, EQUAL_AT)


def compared(ranks: int, microbatches: int, drawn: Mapping[str, Sequence[Microbatches]]) -> list[str]:
    """Return two tables for each distribution: of steps and of peaks."""
    sections = []
    for name, cases in drawn.items():
        length_rows, peak_rows = list[Row](), list[Row]()
        for schedule in SCHEDULES:
            made = make(named(schedule, ranks, microbatches)).schedule
            template, by_length = Template(made), costs_by_length(ranks, made.placement.chunks)
            planner = Planner(made.placement, by_length)
            over, peaks = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            for step in cases:
                units = planner.whole(step.documents)
                costs = planner.costs(units)
                for order, plan in side_by_side(planner, template, units).items():
                    shown = timeline(plan, costs)
                    over[order].append(over_work(shown))
                    peaks[order].append(peak_tokens(shown) / 1e3)
                alike = Costs(costs.stages)
                over["equal"].append(simulate(made, alike).makespan * ranks / sum(by_length.work(step)))
            means = {order: sum(values) / len(values) for order, values in over.items()}
            best = means[NAMES[-1]]
            gains = [f"{means[other] / best - 1:+.1%}" for other in ("given", "light-heavy-light")]
            length_rows.append((schedule, *(f"{mean:.3f}" for mean in means.values()), *gains))
            peak_rows.append((schedule, *(f"{sum(values) / len(values):.0f}" for values in peaks.values())))
        heaviest = [
            max(work) * len(work) / sum(work) for step in cases for work in [costs_by_length(1, 1).work(step)]
        ]
        about = (
            f"{len(cases)} steps; the heaviest microbatch is {sum(heaviest) / len(heaviest):.2f} of the mean."
        )
        gained = "given over searched", "light-heavy-light over searched"
        sections += [
            f"## {name}",
            about,
            table(("steps over work", *NAMES, "equal microbatches", *gained), length_rows),
            table(("peak, thousand tokens", *NAMES), peak_rows),
        ]
    return sections


def over_replicas(ranks: int, microbatches: int, replicas: int, files: Path | None, trials: int) -> str:
    """Return the table of the slowest replica's step, with documents packed in order and balanced."""
    rows = list[Row]()
    for name in WINDOWS:
        for schedule in ("1f1b", "interleaved", "v-zb"):
            made = make(named(schedule, ranks, microbatches)).schedule
            template, by_length = Template(made), costs_by_length(ranks, made.placement.chunks)
            planner = Planner(made.placement, by_length)
            found = defaultdict[str, list[float]](list)
            drawn = list(steps(name, files, microbatches, replicas * trials))
            for first in range(0, len(drawn), replicas):
                shares = drawn[first : first + replicas]
                lengths = [length for share in shares for part in share.documents for length in part]
                work = sum(sum(by_length.work(share)) for share in shares) / replicas / ranks
                balanced = [
                    Microbatches.of([lengths[at] for at in part] for part in share)
                    for share in balance(lengths, replicas, microbatches)
                ]
                for packing, some in (("in order", shares), ("balanced", balanced)):
                    units = [planner.whole(share.documents) for share in some]
                    for how in ("given", "search"):
                        slowest = max(
                            planner.plan(one, how, template=template, budget=0.01).seconds for one in units
                        )
                        found[f"{packing}, {how}"].append(slowest / work)
            rows.append((name, schedule, *(f"{sum(each) / len(each):.3f}" for each in found.values())))
    return table(("lengths", "schedule", *found), rows)


def planning(ranks: int, files: Path | None) -> str:
    """Return the table of the processor time of a plan, in milliseconds."""
    rows = list[Row]()
    for microbatches in (16, 32, 64):
        cases = list(steps("wlbllm 128K", files, microbatches, 5))
        for schedule in SCHEDULES:
            made = make(named(schedule, ranks, microbatches)).schedule
            template = Template(made)
            planner = Planner(made.placement, costs_by_length(ranks, made.placement.chunks))
            row = []
            for how in ("rule", "search"):
                took = []
                for step in cases:
                    units = planner.whole(step.documents)
                    begin = time.process_time()
                    planner.plan(units, how, template=template)  # type: ignore[arg-type]
                    took.append(1e3 * (time.process_time() - begin))
                row.append(f"{sorted(took)[len(took) // 2]:.1f}")
            rows.append((microbatches, schedule, *row))
    return table(("m", "schedule", "by rule, ms", "searched, ms"), rows)


def replay(trace: Path) -> str:
    """Return the table of a recorded job's steps, with its microbatches ordered and moved among replicas."""
    import pandas  # type: ignore[import-untyped]

    events = pandas.read_parquet(trace)
    kinds = [
        events[events.optype.astype(str) == kind].pivot_table(
            index=["step", "dp_rank"], columns=["stage", "mb_id"], values="duration"
        )
        for kind in ("forward-compute", "backward-compute")
    ]
    ranks, count = (len(level) for level in kinds[0].columns.levels)
    template, whole_step = Template(make(named("1f1b", ranks, count)).schedule), whole([[1]] * count)

    def seconds(microbatches: Sequence[Any], how: Any) -> float:
        units = [
            Costs(tuple(StageCosts(float(f), *[float(b) / 2] * 2) for f, b in stages))
            for stages in microbatches
        ]
        costs = UnitCosts(units[0].stages, units=tuple(units), tokens=(1,) * count)
        return in_template(template, whole_step, table_of(costs), how, budget=0.005).seconds

    seconds_by_way = defaultdict[str, list[float]](list)
    for number, forwards in kinds[0].groupby("step"):
        tables = [
            table_of.to_numpy().reshape(-1, ranks, count) for table_of in (forwards, kinds[1].loc[number])
        ]
        units = np.stack(tables, axis=-1).transpose(0, 2, 1, 3)  # replica, microbatch, stage, F or B
        if np.isnan(units).any():
            continue
        replicas, every = len(units), units.reshape(-1, ranks, 2)
        of_stages = every.sum(axis=2)
        heavier = of_stages[:, of_stages.sum(axis=0).argmax()]
        parts = partition(heavier.tolist(), replicas, equal_sizes=True)
        for how in ("given", "rule", "search"):
            seconds_by_way[f"order {how}"].append(max(seconds(share, how) for share in units))
        for how in ("rule", "search"):
            name = f"balanced over replicas, order {how}"
            seconds_by_way[name].append(max(seconds(every[part], how) for part in parts))
        seconds_by_way["work of the heavier stage"].append(float(heavier.sum()) / replicas)
    means = {name: sum(table_of) / len(table_of) for name, table_of in seconds_by_way.items()}
    first = means["order given"]
    rows = [(name, f"{mean:.3f}", f"{first / mean - 1:+.1%}") for name, mean in means.items()]
    return table((f"{len(seconds_by_way['order given'])} steps", "seconds", "gain"), rows)


def main(
    out: Out = RESULTS / "lengths.md",
    files: Annotated[
        Path | None, typer.Option(help="A folder with the whole lists.", metavar="FOLDER")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="trace-SE.parquet.", metavar="FILE")] = None,
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 8,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 16,
    trials: Annotated[int, typer.Option(help="Steps of each distribution.")] = 12,
    replicas: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 8,
) -> None:
    """Compare, and write the tables."""
    steps_by_name = {name: list(steps(name, files, microbatches, trials)) for name in WINDOWS}
    parts = compared(ranks, microbatches, steps_by_name)
    parts += [
        f"## {replicas} replicas",
        "Steps of the slowest replica over the mean work of a rank, without expert parallelism.",
        over_replicas(ranks, microbatches, replicas, files, max(1, trials // 4)),
        "## Planning",
        f"Processor time of a plan for {ranks} ranks, in the median of five.",
        planning(ranks, files),
    ]
    if trace is not None:
        parts += ["## A recorded job", replay(trace)]
    about = f"{ranks} ranks with equal stages, {microbatches} microbatches, messages take no time."
    publish(out, "Microbatches of unlike length", about, *parts)


if __name__ == "__main__":
    typer.run(main)
