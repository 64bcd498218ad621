"""``mpp search``: which configuration of a model is fastest on so many GPUs, and fits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_pp_ext import amounts
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.estimate import AsksMegatron, Margin, SystemName, show_verdict, verdicts
from megatron_pp_ext.cli.model import (
    Flags,
    GlobalBatchSize,
    Model,
    PrintFlags,
    SeqLength,
    described,
    print_flags,
    to_be_started,
)
from megatron_pp_ext.cli.options import takes_groups
from megatron_pp_ext.cli.report import console, heard, waiting
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.files import require_folder, write_json, write_whole
from megatron_pp_ext.job import ask_megatron, options
from megatron_pp_ext.job.ask_megatron import Megatron, Question, Verdict
from megatron_pp_ext.job.flag_effects import not_counted
from megatron_pp_ext.job.layers import stages_flag
from megatron_pp_ext.job.pipeline import for_world, is_permitted, permitted, permitted_as_stock
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner.search.launch_lines import environment
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import FLEX

if TYPE_CHECKING:
    from megatron_pp_ext.cli.measure import RunPlace
    from megatron_pp_ext.cli.search_report import Report
    from megatron_pp_ext.planner.search.best_first import Search
    from megatron_pp_ext.planner.search.candidate import Candidate
    from megatron_pp_ext.planner.search.configurations import Space
    from megatron_pp_ext.planner.search.replays import Evaluated
    from megatron_pp_ext.planner.search.result import Compiles, SearchResult


MOST_GPUS, MOST_SEQUENCES = 2**20, 2**16
"""The most GPUs, and sequences for each in a step, for which a search ends; nobody has as many."""


_ALL = "all"
"""The value of --schedules for all families, which are the default."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The model and job to be trained."""

    flags: Flags = None
    model: Model = None
    print_only: PrintFlags = False
    global_batch_size: GlobalBatchSize = None
    seq_length: SeqLength = None

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes that are given by options, under the names of arguments."""
        return {"global_batch_size": self.global_batch_size, "seq_length": self.seq_length}

    def about(self, job: RequestedJob) -> dict[str, str | int | None]:
        """Return the model and the sizes for which the search is made, for people who read its result."""
        return {
            "model": self.model or "a model by flags",
            "global_batch_size": job.batch.global_batch_size,
            "seq_length": job.model.seq_length,
        }

    def described(self) -> tuple[RequestedJob, list[str]]:
        """Return the job and its flags; ValueError where it has no batch, or has replicas."""
        from megatron_pp_ext.planner.search.candidate import with_search_defaults

        job, words = described(self.flags, self.model, self.sizes, with_search_defaults)
        if not job.batch.global_batch_size:
            raise ValueError("no batch: give --global-batch-size")
        if job.pipeline.pipeline_replicas is not None:
            raise ValueError(
                f"--pipeline-replicas {job.pipeline.pipeline_replicas}: a search gives all stages as many: "
                "leave it out; mpp partition finds replicas, and mpp estimate reports what they take"
            )
        return job, words


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines to train on, and the number of answers."""

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
    """The variants that are tried in addition to all parallel sizes."""

    schedules: Annotated[str, typer.Option(help="Families, with commas between; flex compiles.")] = _ALL
    layout: Annotated[
        str,
        typer.Option(help="How layers are spread over stages: auto, as makes the step shortest, or even."),
    ] = "auto"
    asks: AsksMegatron = True

    def check(self) -> None:
        """Raise ValueError for a schedule that is unknown."""
        _known(self.schedules)

    def space(
        self, job: RequestedJob, words: Sequence[str], gpus: int, gpus_per_node: int
    ) -> "tuple[Space, Compiles]":
        """Return the configurations of ``job``, whose flags are ``words``, and which orders are compiled.

        ValueError for flags that leave nothing to search for, or contradict the options.
        """
        from megatron_pp_ext.planner.search import configurations
        from megatron_pp_ext.planner.search.candidate import alone, fixed_arguments, offered
        from megatron_pp_ext.planner.search.configurations import Space
        from megatron_pp_ext.planner.search.result import Compiles

        for variants in offered():
            variants.refuse(job)
        if job.pipeline.pipeline_loss_rank is not None:
            raise ValueError(
                f"--pipeline-loss-rank {job.pipeline.pipeline_loss_rank}: a search counts ranks from the "
                "one with a V's embedding and head, and steps are the same either way: leave it out, and "
                "add it to the command that you start, with a --pipeline-memory-limit by rank in reverse"
            )
        names, compiles, stock = self._schedules(job)
        flag, is_measured = stages_flag(job), job.pipeline.pipeline_costs is not None
        if flag is not None and not is_measured:
            raise ValueError(
                f"{flag} describes the stages, which a search changes: leave "
                f"{'every | of it' if flag == '--hybrid-layer-pattern' else 'it'} out, or ask mpp estimate"
            )
        is_uneven = self._is_uneven(job)
        fixed = fixed_arguments(words)
        stages = configurations.stages(job, fixed) if is_measured else None
        fixed |= configurations.KEPT if is_measured else frozenset()
        if compiles is Compiles.ONLY:
            fixed |= {"pipeline_schedule"}  # one rank alone has no order to compile
        of_features = options.permitted(job)
        needs_pipeline = any(job.value(name) is not None for name in of_features)
        if "pipeline_model_parallel_size" in fixed and needs_pipeline:
            all_rules.refuse_without_pipeline(job)
        changed = job.changed(**of_features)
        samples = job.batch.sizes[0]
        space = Space(
            changed,
            gpus,
            gpus_per_node,
            samples,
            names,
            fixed,
            is_uneven,
            stages,
            stock,
            has_pipeline="pipeline_model_parallel_size" not in fixed and not is_permitted(alone(job)),
        )
        return space, compiles

    def _schedules(self, job: RequestedJob) -> "tuple[Sequence[str], Compiles, tuple[str, ...]]":
        """Return the families to try, whether to have schedules compiled, and which are Megatron's own.

        These are left where flags go with none of this package.
        """
        from megatron_pp_ext.planner.search.result import Compiles

        names_given, flag = _known(self.schedules), job.pipeline.pipeline_schedule
        if names_given and flag:
            raise ValueError(
                f"--schedules {self.schedules} and --pipeline-schedule {flag} contradict each other: "
                "leave one out"
            )
        candidates = names_given or _known(flag or _ALL) or [*catalog.NAMES, FLEX]
        try:
            names = permitted(job, candidates)
        except ValueError:
            stock = () if flag else tuple(permitted_as_stock(job, candidates))
            if not stock:
                raise
            return stock, Compiles.NEVER, stock
        families = [name for name in names if not catalog.abilities(name).is_compiled]
        if not families:
            return catalog.NAMES, Compiles.ONLY, ()
        return families, Compiles.TOO if len(families) < len(names) else Compiles.NEVER, ()

    def _is_uneven(self, job: RequestedJob) -> bool:
        """Whether layers may move between stages: not of a hybrid model, whose pattern takes no layout.

        Nor of stages that were measured.
        """
        if self.layout not in ("auto", "even"):
            raise ValueError(f"--layout is {self.layout!r}, but must be auto or even: correct it")
        for part in ("embedding", "loss"):
            if self.layout == "auto" and job.value(f"account_for_{part}_in_pipeline_split"):
                raise ValueError(
                    f"--account-for-{part}-in-pipeline-split says how layers are spread, which --layout auto "
                    "finds: leave it out, or add --layout even"
                )
        return self.layout == "auto" and job.model.pattern is None and job.pipeline.pipeline_costs is None


@dataclass(frozen=True, slots=True)
class Outputs(ask.Pictures):
    """The files to write."""

    json: ask.Json = None
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

    def where(self, gpus: int, gpus_per_node: int) -> "RunPlace":
        """Return where jobs on so many GPUs run."""
        from megatron_pp_ext.cli.measure import RunPlace

        return RunPlace(self.submit, gpus, gpus_per_node, self.script)

    def check(self, gpus: int, gpus_per_node: int) -> None:
        """Raise ValueError where jobs on so many GPUs cannot run."""
        ask.require_at_least("--timeout", self.timeout, 0)
        self.where(gpus, gpus_per_node).check(self.steps, self.timeout)


def _known(schedules: str) -> list[str]:
    """Return the names in --schedules, none for all; ValueError for one that is unknown."""
    if schedules.strip() == _ALL:
        return []
    names = [catalog.canonical(name.strip()) for name in schedules.split(",") if name.strip()]
    return [name if catalog.abilities(name).takes_limit else catalog.entry(name).name for name in names]


@app.command()
@takes_groups
def search(
    context: typer.Context,
    *,
    job_options: JobOptions,
    machines: Machines,
    tried: Tried,
    outputs: Outputs,
    measuring: Measuring,
) -> None:
    """Search tensor, pipeline, data, context and expert parallelism, microbatch, recompute and schedule.

    What a flag after -- sets stays as it is, such as --tensor-model-parallel-size 4.

    mpp search --model llama3-8b --gpus 64 --global-batch-size 256 -- --recompute-granularity selective ...
    """
    if job_options.print_only:
        print_flags(to_be_started(job_options.flags, job_options.model, sizes=job_options.sizes).words)
        return
    from megatron_pp_ext.cli.search_report import Report
    from megatron_pp_ext.planner.search import configurations
    from megatron_pp_ext.planner.search.best_first import INTERRUPTED, Search
    from megatron_pp_ext.planner.search.candidate import strip
    from megatron_pp_ext.planner.search.flag_gains import Trials
    from megatron_pp_ext.planner.search.result import SearchBudget
    from megatron_pp_ext.planner.step.comparison import compared
    from megatron_pp_ext.planner.step.error_band import above, headroom
    from megatron_pp_ext.planner.step.model_description import entries

    require_folder(outputs.json)
    machines.check()
    system = systems.read(machines.system)
    if measuring.measure:
        measuring.check(machines.gpus, system.gpus_per_node)
    tried.check()
    job, words = job_options.described()
    samples = job.batch.sizes[0]
    if samples > MOST_SEQUENCES * machines.gpus:
        raise ValueError(
            f"--global-batch-size {samples} is more than {MOST_SEQUENCES:,} for each of "
            f"{machines.gpus} GPUs: lower it, or give more --gpus"
        )
    space, compiles = tried.space(job, words, machines.gpus, system.gpus_per_node)
    if space.stages is not None:
        console.print(configurations.described(space.job, space.stages))
    limit = machines.bytes_of_memory or (1 - headroom(job)) * system.memory_bytes
    budget = SearchBudget(machines.cpu_seconds or inf)
    run = Search(space, system, limit, machines.margin, machines.top, compiles, budget)
    filled_in = tuple(strip(missing(words)))
    all_words, without = [*words, *filled_in], tuple(not_counted(job))
    verdict = None
    with ask_megatron.Megatron() as megatron:
        if tried.asks:
            megatron.prepare()  # it is imported while the search goes on
        try:
            best = run_with_bar(run)
        except KeyboardInterrupt:
            if not run.result.best:
                typer.echo("mpp: interrupted before any configuration was found that fits", err=True)
            raise
        if tried.asks:
            best, verdict = accepted(best, megatron, job, all_words, machines.gpus)
        gains = None
        if best.stopped is None or best.stopped.why != INTERRUPTED:
            trials = Trials(space, job, system, limit, machines.margin)
            if tried.asks:
                trials.refusal = partial(refusal, megatron, job, all_words, machines.gpus)
            gains = trials.gains(best)
    first = best.best[0]
    first.estimate.require_possible(system)
    of_first = first.candidate.applied_to(job), system, first.candidate.data
    about = job_options.about(job) | {"command": context.obj, "date": f"{datetime.now():%Y-%m-%d %H:%M}"}
    report = Report(
        best,
        all_words,
        about,
        system,
        machines.gpus,
        limit,
        above(job),
        measuring.script,
        filled_in,
        without,
        compared(*of_first, first.estimate, machines.margin),
        gains,
    )
    report.show()
    if verdict is not None:
        show_verdict(verdict, job)
    for path in outputs.drawn:
        report.draw(path)
    content = report.content() | entries(job)
    if measuring.measure:
        content["measured"] = _measured(report, measuring)
    if outputs.json is not None:
        write_json(outputs.json, content)
    if outputs.html is not None:
        write_whole(outputs.html, report.page())
    if outputs.sbatch is not None:
        report.write_batch_files(outputs.sbatch)


def accepted(
    result: "SearchResult", megatron: Megatron, job: RequestedJob, words: Sequence[str], gpus: int
) -> "tuple[SearchResult, Verdict]":
    """Return ``result`` without the candidates that Megatron refuses, and its verdict on the best.

    All those are asked about whose commands are shown or written.  ValueError where none is left.
    """
    verdicts_on: dict[Candidate, Verdict] = {}
    while True:
        shown = [entry.candidate for entry in (*result.best, *result.for_less_memory)]
        questions = {
            candidate: _question(candidate, job, words, gpus)
            for candidate in shown
            if candidate not in verdicts_on
        }
        verdicts_on |= zip(questions, verdicts(megatron, list(questions.values())), strict=True)
        refused = [candidate for candidate in shown if verdicts_on[candidate].refusal]
        if not refused:
            return result, verdicts_on[result.best[0].candidate]
        for candidate in dict.fromkeys(refused):
            console.print(
                f"left out: {candidate.name}, which Megatron refuses: {verdicts_on[candidate].refusal}"
            )
        result = result.without(refused)
        if not result.best:
            verdicts_on[refused[0]].require_accepted()


def refusal(
    megatron: Megatron,
    job: RequestedJob,
    words: Sequence[str],
    gpus: int,
    candidate: "Candidate",
    values: Mapping[str, Any],
) -> str:
    """Return why Megatron refuses ``candidate`` with more ``values`` than those of ``words``, or nothing."""
    from megatron_pp_ext.planner.search.flag_gains import with_values

    flags, changed = with_values(words, values, candidate), candidate.applied_to(job.with_arguments(**values))
    question = ask_megatron.question(flags, changed, for_world(changed, gpus), gpus, environment(flags))
    (verdict,) = verdicts(megatron, [question])
    return f"Megatron refuses it: {verdict.refusal}" if verdict.refusal else ""


def _question(candidate: "Candidate", job: RequestedJob, words: Sequence[str], gpus: int) -> Question:
    flags, changed = candidate.flags(words), candidate.applied_to(job)
    return ask_megatron.question(flags, changed, for_world(changed, gpus), gpus, environment(flags))


def _measured(report: "Report", measuring: Measuring) -> list[dict[str, object]]:
    """Run the best for a few steps, show them, and return the numbers of each, the fastest first."""
    from megatron_pp_ext.cli import measure

    best: dict[str, Evaluated] = {}
    for evaluated in report.result.best:
        best.setdefault(
            evaluated.candidate.name, evaluated
        )  # two may have one name, and the first is the shorter
    results = measure.run(
        {name: report.flags(evaluated) for name, evaluated in best.items()},
        measuring.where(report.gpus, report.system.gpus_per_node),
        measuring.jobs,
        measuring.steps,
        measuring.timeout,
    )
    measure.show(results, {name: evaluated.estimate.step_seconds for name, evaluated in best.items()})
    ranked = measure.ranked(results)
    if ranked[0].step_seconds:
        report.show_command("To run the fastest measured:", best[ranked[0].name])
    return [asdict(result) for result in ranked]


def run_with_bar(search: "Search") -> "SearchResult":
    """Search, with a progress bar on a terminal, and elsewhere with a line now and then."""

    def so_far() -> str:
        best = search.result.best
        return f", best so far {best[0].estimate.step_seconds:.4g} s" if best else ""

    most = search.budget.words
    if not console.is_terminal:
        with waiting(f"searching {most}") as take:
            return search.run(lambda phase, done, total: take(f"{phase} {done:,} of {total:,}{so_far()}"))
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task("bounding", total=None)
    with bar, heard(lambda line: bar.update(task, description=line)):

        def progress(phase: str, done: int, total: int) -> None:
            bar.update(task, description=f"{most}: {phase}{so_far()}", completed=done, total=total)

        return search.run(progress)
