"""The runs of ``mpp verify``: stock's 1F1B and a schedule, for a few steps from one checkpoint.

Both start as a fine-tuning does (``--finetune``): with the checkpoint's weights, and with a new optimizer,
learning-rate schedule, random state and data order, which are then the same for both.  So neither the
iteration at which the checkpoint was saved nor the way in which optimizer states are cut matters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext.job import flag_table, layers
from megatron_pp_ext.jobs import process
from megatron_pp_ext.jobs.command import last, short_run, training, whole_number, without, words_of
from megatron_pp_ext.jobs.failure import reason
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import run_record
from megatron_pp_ext.schedule.formats.run_record import RunRecord
from megatron_pp_ext.schedule.placement import Shape

CHECKPOINT, STOCK, AGAIN, SCHEDULE = "checkpoint", "stock", "stock-again", "schedule"

SCHEDULE_FLAGS: Mapping[str, int] = {
    **flag_table.of_schedules(),
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--overlap-moe-expert-parallel-comm": 0,
}
"""The flags that only a schedule needs, each with the number of words after it: stock's 1F1B has none."""

_LAYOUT = "--pipeline-model-parallel-layout"
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


@dataclass(frozen=True, slots=True)
class Run:
    """One of the runs: its name, its purpose in words, and its flags.  ``folder`` holds its output."""

    name: str
    what: str
    flags: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        """All output of the run."""
        return self.folder / f"{self.name}.log"

    @property
    def records(self) -> Path:
        """The folder for the records of its ranks."""
        return self.folder / self.name


def schedule_of(flags: Sequence[str]) -> str:
    """Return the schedule that ``flags`` request.

    Raises ValueError where there is none, where it is unknown, and where it cannot be compared with stock.
    """
    words = words_of(flags)
    name = last(words, "--pipeline-schedule")
    if not name:
        raise ValueError("the flags name no schedule to verify: add --pipeline-schedule NAME after --")
    can = catalog.abilities(name)
    if not can.flushes:
        raise ValueError(
            f"{name} never flushes, so its microbatches meet older weights than stock's and its losses "
            "differ by design: verify a schedule that flushes"
        )
    if not can.is_compiled and can.file is None:
        name = catalog.entry(name).name
    if whole_number(words, "--pipeline-model-parallel-size") < 2:
        raise ValueError("a schedule needs a pipeline: set --pipeline-model-parallel-size to 2 or more")
    if "--ckpt-step" in words:
        raise ValueError(
            "--ckpt-step cannot be resumed as a fine-tuning, which takes the latest step: leave it out, and "
            "give a folder whose latest checkpoint is the one to start from"
        )
    return name


def differs_with_dropout(name: str) -> str | None:
    """Return why schedule ``name`` differs from stock's 1F1B with dropout; None where it does not."""
    if name in catalog.NAMES and catalog.entry(name).shape is Shape.LINEAR:
        return None
    may = "differ" if name in catalog.NAMES else "differ wherever it places layers unlike 1F1B"
    return (
        f"with dropout, losses under {name} {may}: dropout masks are drawn from a rank's random state, which "
        "Megatron seeds by pipeline rank, and other layers are on each rank"
    )


def planned(
    flags: Sequence[str],
    folder: Path,
    steps: int,
    *,
    checkpoint: Path | None = None,
    keep_dropout: bool = False,
    gradients: bool = False,
    repeat: bool = False,
) -> list[Run]:
    """Return the runs in the order in which they start.

    Without a ``checkpoint``, which may also be given with --load, one step of stock's 1F1B makes it.
    ``repeat`` runs stock a second time.  Raises ValueError for flags that cannot be compared.
    """
    name = schedule_of(flags)
    load = checkpoint or (Path(load_flag) if (load_flag := last(words_of(flags), "--load")) else None)
    if load is not None and not (load / "latest_checkpointed_iteration.txt").is_file():
        raise ValueError(
            f"{load} holds no checkpoint (no latest_checkpointed_iteration.txt): correct --load or "
            "--checkpoint, or leave it out, and one is made"
        )
    no_dropout = {} if keep_dropout else {"--attention-dropout": 0, "--hidden-dropout": 0}
    schedule_flags = list(without(flags))
    flags_of_stock = list(stock_flags(schedule_flags))
    runs = []
    if load is None:
        load = folder / "weights"
        checkpoint_flags = short_run(flags_of_stock, 1, {**no_dropout, "--save": load, "--save-interval": 1})
        checkpoint_flags += ["--ckpt-format", "torch_dist", "--no-save-optim", "--no-save-rng"]
        runs.append(
            Run(CHECKPOINT, "one step of stock's 1F1B makes the checkpoint", tuple(checkpoint_flags), folder)
        )

    def resumed(run: str, purpose: str, base: Sequence[str]) -> Run:
        changed = {**no_dropout, "--load": load, "--verify-pipeline": folder / run}
        switches = ["--finetune", *["--verify-pipeline-gradients"] * gradients]
        return Run(run, purpose, (*short_run(base, steps, changed), *switches), folder)

    # The schedule first: flags that it refuses are then found before stock has run.
    runs.append(resumed(SCHEDULE, f"{name} from the checkpoint on", schedule_flags))
    runs.append(resumed(STOCK, "stock's 1F1B from the checkpoint on", flags_of_stock))
    if repeat:
        runs.append(resumed(AGAIN, "stock's 1F1B once more, for its own spread", flags_of_stock))
    return runs


def start(
    runs: Iterable[Run],
    ranks: int,
    script: Path | None,
    cpu: bool,
    report: Callable[[Run], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start ``runs`` one after the other on ``ranks`` ranks of this machine, and ``report`` each before.

    ``environment`` is added to this process's own.  Raises ValueError, naming the log, for a run that fails.
    """
    for run in runs:
        for file in (run.log, *run.records.glob("*")):
            file.unlink(missing_ok=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        report(run)
        if status := process.run(training(run.flags, ranks, script, cpu), run.log, environment):
            cause = reason(run.log.read_text(encoding="utf-8", errors="replace"))
            raise ValueError(f"the run {run.name} ended with status {status}: {cause} ({run.log})")


def recorded(runs: Iterable[Run], steps: int) -> dict[str, RunRecord]:
    """Return the records of the runs that were resumed; ValueError, naming the log, where one has none."""
    records = {}
    for run in runs:
        if run.name != CHECKPOINT:
            try:
                records[run.name] = run_record.read(run.records, steps)
            except ValueError as error:
                raise ValueError(f"the run {run.name}: {error} ({run.log})") from error
    return records


def stock_flags(flags: Sequence[str]) -> Iterator[str]:
    """Yield ``flags`` for stock's 1F1B: without what only a schedule needs, and with a stage on each rank."""
    ranks = whole_number(words_of(flags), "--pipeline-model-parallel-size")
    following = without(flags, SCHEDULE_FLAGS)
    for flag in following:
        name, equals, value = flag.partition("=")
        if name in (_LAYOUT, *_PATTERNS):
            cut = value if equals else next(following, "")
            merged = _merged_layout(cut, ranks) if name == _LAYOUT else _merged_pattern(cut, ranks)
            yield from (name, merged)
        else:
            yield flag


def _merged_layout(text: str, ranks: int) -> str:
    """A layout in which each rank has, as one stage, as many consecutive stages as it had chunks."""
    stages = layers.stages_of(text)
    return text if len(stages) <= ranks else "|".join(_merged(stages, ranks))


def _merged_pattern(text: str, ranks: int) -> str:
    """The same for the layers of a hybrid model; MTP layers stay after their slash."""
    main, slash, mtp = text.partition("/")
    stages = main.split("|")
    return text if len(stages) <= ranks else "|".join(_merged(stages, ranks)) + slash + mtp


def _merged(stages: Sequence[str], ranks: int) -> Iterator[str]:
    stages_per_rank, remainder = divmod(len(stages), ranks)
    if remainder:
        raise ValueError(f"{len(stages)} stages cannot be shared evenly by {ranks} ranks: correct the layout")
    for rank in range(ranks):
        yield "".join(stages[rank * stages_per_rank : (rank + 1) * stages_per_rank])
