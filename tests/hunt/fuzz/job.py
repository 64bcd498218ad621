"""From a drawn row to the flags of its runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random

from megatron_pp_ext.features.pairs.order import in_pairs
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.formats import costs_file, csv_file
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.verification.reference_runs import stock_flags
from tests.hunt.fuzz.factors import DATA, FLAGS, Row
from tests.support.features import SEQUENCE
from tests.support.random_orders import random_schedule

STOCK = "stock"
CSV, CSV_ANY_ORDER = "csv", "csv-any"
"""Of ``csv-any`` each stage adds up the microbatches' gradients in an order of its own."""

STEPS, SAVED_AFTER, STEPS_WITH_CHECKPOINT = 3, 2, 4

_RANKS_OF_A_STAGE = {"none": 1, "dp4": 4, "tp2-sp-dp2": 4, "tp2-sp-cp2": 4}
"""Two under every other parallelism."""

_REPLICAS = {"dp2": 2, "ep2": 2, "dp4": 4, "tp2-sp-dp2": 2}
_PREDICTIONS = {"none": 0, "one": 1, "two": 2}
_PAIR = 0.6
"""What a pair takes of the sum of its halves: so little that most pairs shorten a step."""

_GROWING = (2, 4, 6)
_CHECKPOINTS = {
    "sync": "",
    "async": "--async-save",
    "persistent": "--async-save --use-persistent-ckpt-worker",
}
_MEASURES = {
    "none": "",
    "trace": "--pipeline-trace {folder}/trace.json",
    "profile": "--pipeline-profile-steps 1-1",
}


GRAPHS: Mapping[str, str] = {
    "layers": "transformer_engine",
    "attention": "transformer_engine --cuda-graph-modules attn",
    "mlp": "transformer_engine --cuda-graph-modules mlp",
    "local": "local",
}
"""The CUDA graphs of a job, as values of --cuda-graph-impl."""

_ENGINE = "--transformer-impl transformer_engine --te-rng-tracker"
_GRAPHED = "--pipeline-unproved --cuda-graph-warmup-steps 1 --cuda-graph-impl"


def may_capture(row: Row, kind: str) -> bool:
    """Whether a job can have these graphs: of experts none have all, and ``local`` ones hold one order."""
    if row["experts"] != "none" or row["pairs"] != "none":
        return kind == "attention"
    if kind != "local":
        return True
    name = row["schedule"].split()[0]
    is_whole = name in catalog.ENTRIES and not catalog.abilities(name).splits_backward
    plain = {"microbatches": "growing", "measures": "profile", "sharing": "all-ranks"}
    return is_whole and all(row[factor] != level for factor, level in plain.items())


def ranks(row: Row) -> int:
    """The number of ranks of a job."""
    return int(row["pipeline"]) * _RANKS_OF_A_STAGE.get(row["parallel"], 2)


def has_checkpoint(row: Row) -> bool:
    """Whether the job saves one and goes on from it under another schedule."""
    return row["checkpoint"] != "none"


def stock(row: Row, data: Path) -> list[str]:
    """The flags of the job under stock's 1F1B."""
    return list(stock_flags(_job(row, data)))


def trained(row: Row, data: Path, folder: Path) -> list[str]:
    """The flags of the job under its schedule; ``folder`` is for what it writes."""
    measures = _MEASURES[row["measures"]].format(folder=folder).split()
    host = [] if row["host"] == "none" else ["--pipeline-offload", row["host"]]
    order = [] if row["order"] == "none" else ["--pipeline-order", row["order"]]
    slices = [] if row["slices"] == "none" else ["--pipeline-slice-tokens", row["slices"]]
    graphs = [] if row["graphs"] == "none" else f"{_GRAPHED} {GRAPHS[row['graphs']]}".split()
    schedule = _schedule(row, row["schedule"], folder)
    return [*_job(row, data), *schedule, *measures, *host, *order, *slices, *graphs]


def is_cut(row: Row) -> bool:
    """Whether sequences may be cut: nothing is refused beside slices, and their sums are those of the whole.

    Experts are balanced by slices, dropout draws other numbers, and sums may overflow in other places.  A
    context-parallel rank that divides its losses by its own tokens has other ones than under stock.
    """
    whole = {"pairs": "none", "sharing": "none", "dropout": "off"}
    return (
        all(row[factor] == level for factor, level in whole.items())
        and row["experts"] in ("none", "biased")
        and row["precision"] != "fp16-overflows"
        and row["measures"] != "profile"
        and ("cp" not in row["parallel"] or row["loss"] == "by-token")
        and not row["schedule"].startswith(CSV)
    )


def saving(checkpoint: str, folder: Path) -> list[str]:
    """The flags that save a checkpoint to ``folder`` in that level's way."""
    if checkpoint == "none":
        return []
    flags = ["--save", str(folder / "checkpoint"), "--save-interval", str(SAVED_AFTER)]
    return [*flags, "--ckpt-format", "torch_dist", *_CHECKPOINTS[checkpoint].split()]


def resumed(row: Row, data: Path, folder: Path) -> list[str]:
    """The flags of its last steps, from the checkpoint on, under the schedule that it goes on with."""
    is_stock = row["resume"] == STOCK
    flags = stock(row, data) if is_stock else [*_job(row, data), *_schedule(row, row["resume"], folder)]
    return [*flags, "--load", str(folder / "checkpoint"), "--ckpt-step", str(SAVED_AFTER)]


def file_of(row: Row, name: str) -> Schedule:
    """The random order that ``name``, such as "csv v 2", stands for; in pairs if those of the row are."""
    kind, shape, chunks = name.split()
    random = Random(f"{row['seed']} {name}")
    placement = Placement(Shape(shape), int(row["pipeline"]), int(chunks))
    in_turn = "F" if kind == CSV_ANY_ORDER else "FIW"
    schedule = random_schedule(random, placement, microbatches(row)[-1], in_turn)
    if row["pairs"] == "none":
        return schedule
    return in_pairs(schedule, replace(Costs.unit(placement), pair=_PAIR)).schedule


def microbatches(row: Row) -> tuple[int, ...]:
    """The microbatches of each step; a single number is that of all."""
    return _GROWING if row["microbatches"] == "growing" else (int(row["microbatches"]),)


def _job(row: Row, data: Path) -> list[str]:
    steps = STEPS_WITH_CHECKPOINT if has_checkpoint(row) else STEPS
    words = ["--pipeline-model-parallel-size", row["pipeline"], *_cut(row), *_batches(row, steps)]
    for factor, levels in FLAGS.items():
        words += levels[row[factor]].split()
    if row["graphs"] != "none":
        words += _ENGINE.split()
    if has_checkpoint(row) and row["optimizer"].startswith("distributed"):
        words.append("--dist-ckpt-optim-fully-reshardable")
    return [word.replace(DATA, str(data)) for word in words]


def _cut(row: Row) -> Iterator[str]:
    """Yield the flags that give the stages their layers: one layer a stage, more where an end is uneven."""
    p, chunks, cut = int(row["pipeline"]), int(row["chunks"]), row["cut"]
    layers = p * chunks
    if cut == "layout":
        layout = _layout(row, layers)
        layers = layout.count("t")
        yield from ("--pipeline-model-parallel-layout", layout)
    elif cut == "ends":
        # An odd number of layers for each rank, where ranks have one stage: so none cuts them into two.
        layers = p * (3 if chunks == 1 else 4) - 2
        yield from ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    elif cut in ("first", "last"):
        layers = 2 * p + 2
        yield from (f"--decoder-{cut}-pipeline-num-layers", "4")
    yield from ("--num-layers", str(layers))


def _layout(row: Row, layers: int) -> str:
    """As many stages as layers; one has a layer more, which another one lacks where ranks have several.

    Where a rank without a layer has fewer kinds of parameters, Megatron cannot load the optimizer's state.
    """
    stages = ["t"] * layers
    empty, full = Random(row["seed"]).sample(range(layers), 2)
    stages[full] = "tt"
    if row["chunks"] != "1" or not has_checkpoint(row):
        stages[empty] = ""
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * _PREDICTIONS[row["prediction"]] + "L"
    return "|".join(stages)


def _batches(row: Row, number: int) -> list[str]:
    """Return the flags of ``number`` steps and their samples."""
    each = int(row["samples"]) * _REPLICAS.get(row["parallel"], 1)
    sizes = [count * each for count in microbatches(row)]
    if len(sizes) == 1:
        return ["--global-batch-size", str(sizes[0]), "--train-iters", str(number)]
    tokens = [SEQUENCE * samples for samples in accumulate([0, *sizes[:-1]])]
    steps = " ".join(f"{start}:{size}" for start, size in zip(tokens, sizes, strict=True))
    # Megatron counts too few samples where growing batches are given in steps.
    samples = sum(sizes[min(step, len(sizes) - 1)] for step in range(number))
    return ["--step-batch-size-schedule", steps, "--train-samples", str(samples)]


def _schedule(row: Row, name: str, folder: Path) -> Sequence[str]:
    """The flags of a schedule as ``schedules`` names it, whose file goes to ``folder``."""
    kind, *details = name.split()
    if kind in (CSV, CSV_ANY_ORDER):
        file = folder / f"{'-'.join([kind, *details])}.csv"
        csv_file.write(file_of(row, name), file)
        return ["--pipeline-schedule", f"csv:{file}"]
    flags = ["--pipeline-schedule", kind]
    if kind == FLEX:
        flags += ["--pipeline-memory-limit", details.pop(0)]
        if row["pairs"] != "none":
            file = folder / "costs.json"
            costs_file.write(
                replace(Costs.per_rank(int(row["pipeline"]), int(row["chunks"])), pair=_PAIR), file
            )
            flags += ["--pipeline-costs", str(file)]
    chunks = details[0] if details else ""
    if chunks and kind != AUTO and row["cut"] != "layout":
        flags += ["--num-virtual-stages-per-pipeline-rank", chunks]
    return flags
