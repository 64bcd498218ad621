"""``mpp search``: which configuration of a model is fastest on so many GPUs, and fits."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.estimate import show_verdict, verdicts
from megatron_pp_ext.cli.model import print_flags, to_be_started
from megatron_pp_ext.cli.options import takes_groups
from megatron_pp_ext.cli.progress import heard, waiting
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.cli.search_options import MOST_SEQUENCES, JobOptions, Machines, Measuring, Outputs, Tried
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.files import require_folder, write_json, write_whole
from megatron_pp_ext.job import ask_megatron
from megatron_pp_ext.job.ask_megatron import Megatron, Question, Verdict
from megatron_pp_ext.job.flag_effects import not_counted
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner.search.launch_lines import environment

if TYPE_CHECKING:
    from megatron_pp_ext.cli.search_report import Report
    from megatron_pp_ext.planner.search.best_first import Search
    from megatron_pp_ext.planner.search.candidate import Candidate
    from megatron_pp_ext.planner.search.replays import Evaluated
    from megatron_pp_ext.planner.search.result import SearchResult


@app.command()
@takes_groups
def search(
    context: typer.Context,
    *,
    job: JobOptions,
    machines: Machines,
    tried: Tried,
    outputs: Outputs,
    measuring: Measuring,
) -> None:
    """Search tensor, pipeline, data, context and expert parallelism, microbatch, recompute and schedule.

    What a flag after -- sets stays as it is, such as --tensor-model-parallel-size 4.

    mpp search --model llama3-8b --gpus 64 --global-batch-size 256 -- --recompute-granularity selective ...
    """
    if job.print_only:
        print_flags(to_be_started(job.flags, job.model, sizes=job.sizes).words)
        return
    from megatron_pp_ext.cli.search_report import Report
    from megatron_pp_ext.planner.search import measured_sizes
    from megatron_pp_ext.planner.search.best_first import Search
    from megatron_pp_ext.planner.search.budget import SearchBudget
    from megatron_pp_ext.planner.search.candidate import strip
    from megatron_pp_ext.planner.step.comparison import compared
    from megatron_pp_ext.planner.step.parameters import entries
    from megatron_pp_ext.planner.step.peaks import above, headroom

    require_folder(outputs.json, outputs.html, *outputs.paths)
    machines.check()
    system = systems.read(machines.system)
    if measuring.measure:
        measuring.check(machines.gpus, system.gpus_per_node)
    tried.check()
    asked, words = job.described()
    samples = asked.batch.sizes[0]
    if samples > MOST_SEQUENCES * machines.gpus:
        raise ValueError(
            f"--global-batch-size {samples} is more than {MOST_SEQUENCES:,} for each of "
            f"{machines.gpus} GPUs: lower it, or give more --gpus"
        )
    space, compiles = tried.space(asked, words, machines.gpus, system.gpus_per_node)
    if space.stages is not None:
        console.print(measured_sizes.described(space.job, space.stages))
    limit = machines.bytes_of_memory or (1 - headroom(asked)) * system.memory_bytes
    budget = SearchBudget(machines.cpu_seconds or inf)
    one = Search(space, system, limit, machines.margin, machines.top, compiles, budget)
    filled_in = tuple(strip(missing(words)))
    all_words, without = [*words, *filled_in], tuple(not_counted(asked))
    verdict = None
    with ask_megatron.Megatron() as megatron:
        if tried.asks:
            megatron.prepare()  # it is imported while the search goes on
        try:
            best = run_with_bar(one)
        except KeyboardInterrupt:
            if not one.result.best:
                typer.echo("mpp: interrupted before any configuration was found that fits", err=True)
            raise
        if tried.asks:
            best, verdict = accepted(best, megatron, asked, all_words, machines.gpus)
    first = best.best[0]
    first.estimate.require_possible(system)
    of_first = first.candidate.applied_to(asked), system, first.candidate.data
    about = job.about(asked) | {"command": context.obj, "date": f"{datetime.now():%Y-%m-%d %H:%M}"}
    report = Report(
        best,
        all_words,
        about,
        system,
        machines.gpus,
        limit,
        above(asked),
        measuring.script,
        filled_in,
        without,
        compared(*of_first, first.estimate, machines.margin),
    )
    report.show()
    if verdict is not None:
        show_verdict(verdict, asked)
    for path in outputs.paths:
        report.draw(path)
    content = report.content() | entries(asked)
    if measuring.measure:
        content["measured"] = _measured(report, measuring)
    if outputs.json is not None:
        write_json(outputs.json, content)
    if outputs.html is not None:
        write_whole(outputs.html, report.page())
    if outputs.sbatch is not None:
        report.write_batch_files(outputs.sbatch)


def accepted(
    result: "SearchResult", megatron: Megatron, asked: RequestedJob, words: Sequence[str], gpus: int
) -> "tuple[SearchResult, Verdict]":
    """Return ``result`` without the candidates that Megatron refuses, and its verdict on the best.

    All those are asked about whose commands are shown or written.  ValueError where none is left.
    """
    verdicts_on: dict[Candidate, Verdict] = {}
    while True:
        shown = [one.candidate for one in (*result.best, *result.frontier)]
        questions = {
            candidate: _question(candidate, asked, words, gpus)
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


def _question(candidate: "Candidate", asked: RequestedJob, words: Sequence[str], gpus: int) -> Question:
    """Return the question about the command that starts ``candidate``."""
    flags, job = candidate.flags(words), candidate.applied_to(asked)
    return ask_megatron.question(flags, job, for_world(job, gpus), gpus, environment(flags))


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

    def found() -> str:
        best = search.result.best
        return f", best so far {best[0].estimate.step_seconds:.4g} s" if best else ""

    most = search.budget.words
    if not console.is_terminal:
        with waiting(f"searching {most}") as take:
            return search.run(lambda phase, done, total: take(f"{phase} {done:,} of {total:,}{found()}"))
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task("bounding", total=None)
    with bar, heard(lambda line: bar.update(task, description=line)):

        def progress(phase: str, done: int, total: int) -> None:
            bar.update(task, description=f"{most}: {phase}{found()}", completed=done, total=total)

        return search.run(progress)
