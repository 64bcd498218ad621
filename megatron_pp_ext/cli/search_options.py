"""The options of ``mpp search``, in groups, each of which checks what it was given."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_pp_ext import amounts
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.estimate import Margin, SystemName
from megatron_pp_ext.cli.model import Flags, GlobalBatchSize, Model, PrintFlags, SeqLength, described
from megatron_pp_ext.job import options
from megatron_pp_ext.job.layers import stages_flag
from megatron_pp_ext.job.pipeline import is_permitted, permitted, permitted_as_stock
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import FLEX

if TYPE_CHECKING:
    from megatron_pp_ext.cli.measure import Where
    from megatron_pp_ext.planner.search.configurations import Space
    from megatron_pp_ext.planner.search.result import Compiles


MOST_GPUS, MOST_SEQUENCES = 2**20, 2**16
"""The most GPUs, and sequences for each in a step, for which a search ends; nobody has as many."""


_ALL = "all"
"""The value of --schedules for all families, which are the default."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained."""

    flags: Flags = None
    model: Model = None
    print_only: PrintFlags = False
    global_batch_size: GlobalBatchSize = None
    seq_length: SeqLength = None

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes that are given by options, under the names of arguments."""
        return {"global_batch_size": self.global_batch_size, "seq_length": self.seq_length}

    def about(self, asked: RequestedJob) -> dict[str, str | int | None]:
        """Return the model and the sizes for which the search is made, for people who read its result."""
        return {
            "model": self.model or "a model by flags",
            "global_batch_size": asked.batch.global_batch_size,
            "seq_length": asked.model.seq_length,
        }

    def described(self) -> tuple[RequestedJob, list[str]]:
        """Return what is asked and its flags; ValueError where it has no batch, or has replicas."""
        from megatron_pp_ext.planner.search.candidate import settled

        asked, words = described(self.flags, self.model, self.sizes, settled)
        if not asked.batch.global_batch_size:
            raise ValueError("no batch: give --global-batch-size")
        if asked.pipeline.pipeline_replicas is not None:
            raise ValueError(
                f"--pipeline-replicas {asked.pipeline.pipeline_replicas}: a search gives all stages as many: "
                "leave it out; mpp partition finds replicas, and mpp estimate reports what they take"
            )
        return asked, words


@dataclass(frozen=True, slots=True)
class Machines:
    """On what it is to be trained, and how many answers are wanted."""

    gpus: Annotated[int, typer.Option(help="How many GPUs there are.")] = 8
    system: SystemName = "h100"
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU that may be used, as in 60GB or 6e10 bytes.  "
            "[default: 94% of it, 90% with experts]",
            metavar="SIZE",
        ),
    ] = None
    margin: Margin = 0.05
    top: Annotated[int, typer.Option(help="How many of the best to show.")] = 10
    cpu_seconds: Annotated[
        float,
        typer.Option(
            help="Seconds of a processor after which the search ends with the best so far; 0 for no limit."
        ),
    ] = 120.0

    @property
    def bytes_of_memory(self) -> float | None:
        """The bytes of a GPU that may be used, None if they are not given; ValueError if there are none."""
        return None if self.memory is None else amounts.memory(self.memory, "--memory")

    def check(self) -> None:
        """Raise ValueError for a number that is too small, and for more GPUs than there can be."""
        ask.require_at_least("--gpus", self.gpus, 1)
        if self.gpus > MOST_GPUS:
            raise ValueError(f"--gpus is {self.gpus}, but must be at most {MOST_GPUS}: lower it")
        ask.require_at_least("--top", self.top, 1)
        ask.require_at_least("--margin", self.margin, 0)
        ask.require_at_least("--cpu-seconds", self.cpu_seconds, 0)


@dataclass(frozen=True, slots=True)
class Tried:
    """What is tried in addition to all parallel sizes."""

    schedules: Annotated[str, typer.Option(help="Families, with commas between; flex compiles.")] = _ALL
    layout: Annotated[
        str,
        typer.Option(help="How layers are spread over stages: auto, as makes the step shortest, or even."),
    ] = "auto"

    def check(self) -> None:
        """Raise ValueError for a schedule that is unknown."""
        _known(self.schedules)

    def space(
        self, asked: RequestedJob, words: Sequence[str], gpus: int, gpus_per_node: int
    ) -> "tuple[Space, Compiles]":
        """Return the configurations of what is ``asked``, whose flags are ``words``, and what is compiled.

        ValueError for flags that leave nothing to search for, or contradict the options.
        """
        from megatron_pp_ext.planner.search import measured_sizes, variants
        from megatron_pp_ext.planner.search.candidate import alone, settled_in
        from megatron_pp_ext.planner.search.configurations import Space
        from megatron_pp_ext.planner.search.result import Compiles

        for one in variants.offered():
            one.refuse(asked)
        if asked.pipeline.pipeline_loss_rank is not None:
            raise ValueError(
                f"--pipeline-loss-rank {asked.pipeline.pipeline_loss_rank}: a search counts ranks from the "
                "one with a V's embedding and head, and steps are the same either way: leave it out, and "
                "add it to the command that you start, with a --pipeline-memory-limit by rank in reverse"
            )
        names, compiles, stock = self._schedules(asked)
        flag, is_measured = stages_flag(asked.job), asked.pipeline.pipeline_costs is not None
        if flag is not None and not is_measured:
            raise ValueError(
                f"{flag} describes the stages, which a search changes: leave "
                f"{'every | of it' if flag == '--hybrid-layer-pattern' else 'it'} out, or ask mpp estimate"
            )
        is_uneven = self._is_uneven(asked)
        fixed = settled_in(words)
        stages = measured_sizes.stages(asked.job, fixed) if is_measured else None
        fixed |= measured_sizes.KEPT if is_measured else frozenset()
        if compiles is Compiles.ONLY:
            fixed |= {"pipeline_schedule"}  # one rank alone has no order to compile
        of_features = options.permitted(asked)
        needs_pipeline = any(asked.job.value(name) is not None for name in of_features)
        if "pipeline_model_parallel_size" in fixed and needs_pipeline:
            all_rules.refuse_without_pipeline(asked)
        job = asked.job.changed(**of_features)
        samples = asked.batch.sizes[0]
        space = Space(
            job,
            gpus,
            gpus_per_node,
            samples,
            names,
            fixed,
            is_uneven,
            stages,
            stock,
            has_pipeline="pipeline_model_parallel_size" not in fixed and not is_permitted(alone(asked)),
        )
        return space, compiles

    def _schedules(self, asked: RequestedJob) -> "tuple[Sequence[str], Compiles, tuple[str, ...]]":
        """Return the families to try, whether to have schedules compiled, and which are Megatron's own.

        These are left where flags go with none of this package.
        """
        from megatron_pp_ext.planner.search.result import Compiles

        given, flag = _known(self.schedules), asked.pipeline.pipeline_schedule
        if given and flag:
            raise ValueError(
                f"--schedules {self.schedules} and --pipeline-schedule {flag} contradict each other: "
                "leave one out"
            )
        wanted = given or _known(flag or _ALL) or [*catalog.NAMES, FLEX]
        try:
            names = permitted(asked, wanted)
        except ValueError:
            stock = () if flag else tuple(permitted_as_stock(asked, wanted))
            if not stock:
                raise
            return stock, Compiles.NEVER, stock
        families = [name for name in names if not catalog.abilities(name).is_compiled]
        if not families:
            return catalog.NAMES, Compiles.ONLY, ()
        return families, Compiles.TOO if len(families) < len(names) else Compiles.NEVER, ()

    def _is_uneven(self, asked: RequestedJob) -> bool:
        """Whether layers may move between stages: not of a hybrid model, whose pattern takes no layout.

        Nor of stages that were measured.
        """
        if self.layout not in ("auto", "even"):
            raise ValueError(f"--layout is {self.layout!r}, but must be auto or even: correct it")
        for part in ("embedding", "loss"):
            if self.layout == "auto" and asked.job.value(f"account_for_{part}_in_pipeline_split"):
                raise ValueError(
                    f"--account-for-{part}-in-pipeline-split says how layers are spread, which --layout auto "
                    "finds: leave it out, or add --layout even"
                )
        return self.layout == "auto" and asked.model.pattern is None and asked.pipeline.pipeline_costs is None


@dataclass(frozen=True, slots=True)
class Outputs(ask.Pictures):
    """The files to write."""

    json: ask.Json = None
    html: Annotated[Path | None, typer.Option(help="Write a page.", metavar="FILE")] = None
    sbatch: Annotated[
        Path | None, typer.Option(help="Write a script for each that submits it to SLURM.", metavar="DIR")
    ] = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """Whether the best are run, where, and for how long."""

    measure: Annotated[
        bool, typer.Option("--measure", help="Run the best for a few steps, and rank them by that.")
    ] = False
    jobs: Annotated[
        Path, typer.Option(help="Where --measure keeps its runs, to go on if interrupted.", metavar="DIR")
    ] = Path("mpp-jobs")
    submit: Annotated[str, typer.Option(help="Where --measure runs them: local or slurm.")] = "local"
    script: ask.Script = None
    steps: Annotated[int, typer.Option(help="Steps that --measure times in each.")] = 5
    timeout: Annotated[float, typer.Option(help="Seconds that --measure gives each.")] = 900.0

    def where(self, gpus: int, gpus_per_node: int) -> "Where":
        """Return where jobs on so many GPUs run."""
        from megatron_pp_ext.cli.measure import Where

        return Where(self.submit, gpus, gpus_per_node, self.script)

    def check(self, gpus: int, gpus_per_node: int) -> None:
        """Raise ValueError where jobs on so many GPUs cannot run."""
        ask.require_at_least("--timeout", self.timeout, 0)
        self.where(gpus, gpus_per_node).check(self.steps, self.timeout)


def _known(schedules: str) -> list[str]:
    """Return the names in --schedules, none for all; ValueError for one that is unknown."""
    if schedules.strip() == _ALL:
        return []
    named = [catalog.canonical(name.strip()) for name in schedules.split(",") if name.strip()]
    return [name if catalog.abilities(name).takes_limit else catalog.entry(name).name for name in named]
