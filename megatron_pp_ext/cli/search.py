"""``mpp search``: which configuration of a model is fastest on so many GPUs, and fits."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.estimate import Margin, SystemName
from megatron_pp_ext.cli.model import Flags, Model, PrintFlags, described, print_flags, words_of
from megatron_pp_ext.cli.progress import heard, waiting
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.files import require_folder, write_whole

if TYPE_CHECKING:
    from megatron_pp_ext.planner.search.best_first import Compiles, Result, Search


@app.command()
def search(
    flags: Flags = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs there are.")] = 8,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    system: SystemName = "h100",
    model: Model = None,
    print_only: PrintFlags = False,
    memory: Annotated[
        float | None, typer.Option(help="Bytes of a GPU that may be used.  [default: all]")
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the best to show.")] = 10,
    schedules: Annotated[
        str | None,
        typer.Option(help="Families, with commas between; flex compiles.  [default: all]"),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="How layers are spread over stages: auto, as makes the step shortest, or even."),
    ] = "auto",
    margin: Margin = 0.05,
    json: ask.Json = None,
    svg: ask.Svg = None,
    png: ask.Png = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.", metavar="FILE")] = None,
    sbatch: Annotated[
        Path | None, typer.Option(help="Write a script for each that submits it to SLURM.", metavar="DIR")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the best for a few steps, and rank them by that.")
    ] = False,
    jobs: Annotated[
        Path, typer.Option(help="Where --measure keeps its runs, to go on if interrupted.", metavar="DIR")
    ] = Path("mpp-jobs"),
    submit: Annotated[str, typer.Option(help="Where --measure runs them: local or slurm.")] = "local",
    script: Annotated[
        Path | None,
        typer.Option(
            help="Your training script.  [default: this package's pretrain_gpt]",
            metavar="FILE",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that --measure times in each.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds that --measure gives each.")] = 900.0,
) -> None:
    """Search tensor, pipeline, data, context and expert parallelism, microbatch, recompute and schedule.

    What a flag behind -- sets stays as it is, such as --tensor-model-parallel-size 4.

    mpp search --model llama3-8b --gpus 64 --global-batch-size 256 -- --recompute-granularity selective ...
    """
    if print_only:
        print_flags(words_of(flags, model))
        return
    from megatron_pp_ext.cli import search_report as report
    from megatron_pp_ext.cli.measure import Where, ranked, run
    from megatron_pp_ext.cli.measure import show as show_measured
    from megatron_pp_ext.job.layers import stages_flag
    from megatron_pp_ext.job.rules import all_rules
    from megatron_pp_ext.job.rules.asked import Asked
    from megatron_pp_ext.jobs.command import missing
    from megatron_pp_ext.planner import system as systems
    from megatron_pp_ext.planner.search.best_first import HEADROOM, Compiles, Search
    from megatron_pp_ext.planner.search.candidate import settled_in, strip
    from megatron_pp_ext.planner.search.configurations import Space
    from megatron_pp_ext.planner.search.launch_lines import flags as flags_of

    pictures = ask.Pictures(svg, png).paths
    for output in (json, html, *pictures):
        if output is not None:
            require_folder(output)
    for name, value, least in (
        ("--gpus", gpus, 1),
        ("--top", top, 1),
        ("--memory", 1 if memory is None else memory, 1),
        ("--margin", margin, 0),
        ("--timeout", timeout, 0),
    ):
        ask.require_at_least(name, value, least)
    machine = systems.read(system)
    where = Where(submit, gpus, machine.gpus_per_node, script)
    if measure:
        where.check(steps, timeout)
    _known(schedules)
    sizes = {"global_batch_size": global_batch_size, "seq_length": seq_length}
    args, words = described(flags, model, sizes)
    batch = args.global_batch_size
    if not batch:
        raise ValueError("no batch: give --global-batch-size")
    if args.pipeline_replicas is not None:
        raise ValueError(
            f"--pipeline-replicas {args.pipeline_replicas}: a search gives all stages as many: leave it "
            "out; mpp partition finds replicas, and mpp estimate tells what they take"
        )
    names, compiles = _schedules(schedules, args)
    flag = stages_flag(args)
    if flag is not None:
        raise ValueError(
            f"{flag} describes the stages, which a search changes: leave "
            f"{'every | of it' if flag == '--hybrid-layer-pattern' else 'it'} out, or ask mpp estimate"
        )
    is_uneven = _is_uneven(layout, args)
    fixed = settled_in(words)
    if compiles is Compiles.ONLY:
        fixed |= {"pipeline_schedule"}  # one rank alone has no order to compile
    if "pipeline_model_parallel_size" in fixed and args.pipeline_vocabulary is not None:
        all_rules.refuse_without_pipeline(Asked(args))
    space = Space(args, gpus, machine.gpus_per_node, batch, names, fixed, is_uneven)
    limit = memory or (1 - HEADROOM) * machine.memory_bytes
    found = run_with_bar(Search(space, machine, limit, margin, top, compiles))
    filled_in = tuple(strip(missing(words)))
    whole = report.Report(found, [*words, *filled_in], machine, gpus, limit, script, filled_in)
    whole.show()
    for path in pictures:
        whole.draw(path)
    content = whole.content()
    if measure:
        estimated: dict[str, float] = {}
        commands: dict[str, list[str]] = {}
        for one in found.best:
            estimated.setdefault(one.candidate.name, one.estimate.step_seconds)
            commands.setdefault(one.candidate.name, flags_of(one.candidate, [*words, *filled_in]))
        measured = run(commands, where, jobs, steps, timeout)
        show_measured(measured, estimated)
        fastest = ranked(measured)[0]
        if fastest.step_seconds:
            name = fastest.name
            one = next(one for one in found.best if one.candidate.name == name)
            whole.show_command("To run the fastest measured:", one)
        content["measured"] = [asdict(result) for result in ranked(measured)]
    if json is not None:
        write_whole(json, dumps(content, indent=1) + "\n")
    if html is not None:
        write_whole(html, whole.page())
    if sbatch is not None:
        whole.write_batch_files(sbatch)


def run_with_bar(search: "Search") -> "Result":
    """Search, with a progress bar on a terminal."""
    if not console.is_terminal:
        with waiting("searching"):
            return search.run()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task("bounding", total=None)
    with bar, heard(lambda line: bar.update(task, description=line)):

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return search.run(progress)


def _known(schedules: str | None) -> list[str]:
    """Return the names in --schedules; ValueError for one that is unknown."""
    from megatron_pp_ext.schedule import catalog
    from megatron_pp_ext.schedule.names import FLEX

    named = [name.strip() for name in (schedules or "").split(",") if name.strip()]
    return [FLEX if catalog.canonical(name) == FLEX else catalog.entry(name).name for name in named]


def _is_uneven(layout: str, args: Namespace) -> bool:
    """Whether --layout lets stages differ; a hybrid model, whose pattern takes no layout, has even ones."""
    from megatron_pp_ext.job import layers

    if layout not in ("auto", "even"):
        raise ValueError(f"--layout is {layout!r}, but must be auto or even: correct it")
    for part in ("embedding", "loss"):
        if layout == "auto" and getattr(args, f"account_for_{part}_in_pipeline_split"):
            raise ValueError(
                f"--account-for-{part}-in-pipeline-split says how layers are spread, which --layout auto "
                "finds: leave it out, or add --layout even"
            )
    return layout == "auto" and layers.pattern(args) is None


def _schedules(given: str | None, args: Namespace) -> tuple[Sequence[str], "Compiles"]:
    """The families to try, and whether to have schedules compiled."""
    from megatron_pp_ext.job.pipeline import permitted
    from megatron_pp_ext.planner.search.best_first import Compiles
    from megatron_pp_ext.schedule import catalog
    from megatron_pp_ext.schedule.names import FLEX

    flag = args.pipeline_schedule
    if given and flag:
        raise ValueError(
            f"--schedules {given} and --pipeline-schedule {flag} contradict each other: leave one out"
        )
    names = permitted(args, _known(given or flag) or [*catalog.NAMES, FLEX])
    families = [name for name in names if name != FLEX]
    if not families:
        return catalog.NAMES, Compiles.ONLY
    return families, Compiles.TOO if FLEX in names else Compiles.NEVER
