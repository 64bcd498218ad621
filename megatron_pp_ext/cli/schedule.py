"""The commands that show schedules: ``mpp schedule``, ``simulate``, ``compare`` and ``trace``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli import lengths as by_length
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.lengths import LengthOptions, StepMicrobatches
from megatron_pp_ext.cli.report import bound_of, console, print_units, report, require_size, show, waiting
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import TRIALS, named
from megatron_pp_ext.features.offload.cli import LEGEND, OffloadOptions, some_limits
from megatron_pp_ext.features.pairs.order import Pairs, request_in_pairs
from megatron_pp_ext.features.units import cli as in_units
from megatron_pp_ext.features.units.cli import LEGEND as SLICES_LEGEND
from megatron_pp_ext.features.units.cli import Slicing
from megatron_pp_ext.job.call import with_loss_on
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import CostModel
from megatron_pp_ext.schedule.entry import FLEX
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import loop
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import page


def _names(incomplete: str) -> list[str]:
    return [name for name in (*catalog.NAMES, FLEX) if name.startswith(incomplete)]


def _memory_limit(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no number; give a fraction of what 1f1b keeps, such as 0.5, or a number of "
            "microbatches. Bytes are for mpp search --memory"
        ) from None


@app.command()
@ask.takes_groups
def schedule(
    name: Annotated[str, typer.Argument(help="A name from `mpp list`.", autocompletion=_names)],
    ranks: ask.Ranks = 4,
    microbatches: StepMicrobatches = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages a rank, where the schedule leaves it open.")
    ] = None,
    loss_rank: Annotated[
        str | None,
        typer.Option(
            help="For a V: the rank with embedding, output layer and loss, first or last.  [default: first]"
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            help="For flex: the memory of a rank.  Up to 8 it is a fraction of the activations that 1f1b "
            "keeps, and messages come on top; a larger one is a number of microbatches "
            "that a whole rank keeps, or with --costs an amount in the file's unit for activations and "
            "messages.",
            parser=_memory_limit,
            metavar="NUMBER",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="For flex: how many orders to try; 8000 search eight times as long as the default."
        ),
    ] = None,
    shared_vocabulary: Annotated[
        bool,
        typer.Option("--shared-vocabulary", help="Let all ranks share the output layer of --output-layer."),
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(
            help="With --lengths, the order that is shown and written: given, rule or search.  "
            "[default: search]"
        ),
    ] = None,
    *,
    times: ask.Times,
    lengths: LengthOptions,
    offload: OffloadOptions,
    slicing: Slicing,
    files: ask.Files,
) -> None:
    """Build a schedule, simulate it and show it.

    Times are those of a whole rank, so that all schedules compare: its F, I and W of one microbatch take 1
    each, and a chunk takes its part of them.  With --lengths microbatches differ, and orders of them are
    compared; what is shown and written has the one of --order.
    """
    name = catalog.canonical(name)
    count = lengths.count(microbatches)
    slicing.require_lengths(lengths.lengths is not None)
    if lengths.lengths is not None and (shared_vocabulary or offload.is_given):
        raise ValueError(
            "--lengths goes neither with --shared-vocabulary nor with --offload: leave these out"
        )
    can = catalog.abilities(name)
    if times.pair_time is not None and shared_vocabulary:
        raise ValueError("--pair-time and --shared-vocabulary do not go together: leave one out")
    if can.takes_limit and shared_vocabulary:
        raise ValueError("--shared-vocabulary is for named schedules, not for flex: leave one out")
    if can.file is not None:
        raise ValueError(f"{name} is a file: look at it with mpp simulate {can.file}")
    if can.takes_limit:
        from megatron_pp_ext.cli import flex

        request = flex.flex_request(ranks, count, chunks, memory_limit)
        make_it, about = flex.make_flex, "compiling flex"
    else:
        if memory_limit is not None:
            raise ValueError(
                f"--memory-limit is for flex, {name} has its own memory: leave it out, or use flex"
            )
        if trials is not None:
            raise ValueError(f"--trials is for flex, {name} is not searched for: leave it out, or use flex")
        catalog.entry(name)  # refuses what only training runs
        request = named(name, ranks, count, chunks)
        make_it, about = make, f"simulating {request.schedule}"
    if loss_rank is not None:
        request = with_loss_on(request, loss_rank, "--loss-rank")
    if slicing.is_given and (shared_vocabulary or offload.is_given):
        raise ValueError("--slices goes neither with --shared-vocabulary nor with --offload: leave these out")
    slicing.require_size(request)
    require_size(request, files)
    request = replace(request, splits_head=shared_vocabulary, trials=TRIALS if trials is None else trials)
    costs = offload.costs(times.costs(request.finest), ranks)
    request = request_in_pairs(request, times.pair_time is not None or (can.takes_limit and costs.pair < 1))
    if slicing.slice_tokens is not None:
        in_units.show_schedule(request, costs, times, lengths, slicing, by_length.units(times), files)
        return
    if lengths.lengths is not None:
        by_length.show_schedule(request, costs, times, lengths, files, make_it, order)
        return
    if order is not None:
        raise ValueError("--order is given without --lengths, the lengths of documents: give both")

    model = CostModel.fixed(costs)
    with waiting(about):
        result = make_it(slicing.added_to(offload.added_to(request)), model)
        timeline = simulate(
            result.schedule, slicing.costs(costs.merged(result.schedule.placement.stages), result.schedule)
        )
        notes = [*offload.notes(request, model, timeline, files)]
        bound = bound_of(timeline) if result.lower_bound is None else result.lower_bound
        report(timeline, bound, times.units, files, notes)
    if result.origin:
        console.print(f"found by: {result.origin}")


@app.command("simulate")
@ask.takes_groups
def simulate_file(
    file: Annotated[Path, typer.Argument(help="A schedule as CSV: a row a rank, cells such as 3F0.")],
    *,
    times: ask.Times,
    files: ask.Files,
) -> None:
    """Check a schedule from a file, simulate it and show it."""
    with waiting(f"simulating {file}"):
        read = csv_file.read(file)
        timeline = simulate(read, times.costs(read.placement))
        report(timeline, bound_of(timeline), times.units, files)


@app.command()
@ask.takes_groups
def compare(
    ranks: ask.Ranks = 4,
    microbatches: StepMicrobatches = None,
    *,
    times: ask.Times,
    lengths: LengthOptions,
    offload: OffloadOptions,
    slicing: Slicing,
    pictures: ask.Pictures,
) -> None:
    """Compare all schedules of one or two chunks a rank: a table, and a picture of memory and step time.

    Times are those of a whole rank.  With --chunk-units and --costs they are those of one of two chunks a
    rank, and an action of a schedule with one chunk takes twice as long.  With --output-layer each schedule
    has a second row, where all ranks share the output layer, and with --pair-time a row with pairs if it has
    any.  With --offload each has one with activations on the host, and with --slices one in slices.  With
    --lengths a row has the step with each order of the microbatches, as a multiple of the work of a rank, and
    with --slice-tokens also the step whole and in slices.
    """
    count = lengths.count(microbatches)
    slicing.require_lengths(lengths.lengths is not None)
    if lengths.lengths is not None:
        if offload.is_given:
            raise ValueError("--lengths and --offload do not go together: leave one out")
        if pictures.html is not None:
            raise ValueError("--html shows schedules one by one, and not by --lengths: leave one out")
        if slicing.slice_tokens is not None:
            in_units.show_comparison(ranks, times, lengths, slicing, pictures)
        else:
            by_length.show_comparison(ranks, times, lengths, pictures)
        return
    from megatron_pp_ext.cli import flex
    from megatron_pp_ext.view import terminal

    requests = by_length.compared(ranks, count).values()
    for request in requests:
        slicing.require_size(request)
    cut = loop(ranks, 2)
    halves = offload.costs(times.costs(cut), ranks)
    model = CostModel(lambda cut: times.costs(cut) if cut.splits_head else halves).merged_from(cut)
    pairs = (Pairs(),) if halves.pair < 1 else ()
    timelines = {}
    for request in requests:
        rows = {"": request}
        if offload.is_given:
            rows[" +H"] = offload.added_to(request)
        if times.pair_time is not None and catalog.entry(request.schedule).make_paired:
            rows[" +P"] = request_in_pairs(request)
        if times.output_layer:
            rows[" +S"] = replace(request, splits_head=True)
        if slicing.is_given:
            rows[f" /{slicing.slices}"] = slicing.added_to(request)
        with waiting(f"simulating {request.schedule}"):
            for ending, row in rows.items():
                costs = model.of(row.finest)
                schedule = make(row, model).schedule
                timelines[f"{request.schedule}{ending}"] = simulate(schedule, slicing.costs(costs, schedule))
    console.print(f"{ranks} ranks, {count} microbatches")
    with waiting("counting activations and messages"):
        console.print(terminal.summary_table(timelines))
    print_units(times.units)
    for is_shown, note in (
        (times.output_layer, "+S: all ranks share the output layer, else the last stage has it"),
        (times.pair_time is not None, "+P: forwards and backwards in pairs"),
        (offload.is_given, LEGEND),
        (slicing.is_given, SLICES_LEGEND.format(slicing.slices, slicing.slices)),
    ):
        if is_shown:
            console.print(note, style="dim")
    # The compiler may take a minute, and nobody is to wait for it before the rest is seen.
    with waiting("compiling flex for several memory limits"):
        frontier = {
            f"flex {fraction:.2f}": timeline
            for fraction, timeline in flex.some_limits(ranks, count, halves, pairs).items()
        }
    copied = {}
    if offload.is_given:
        with waiting("planning flex with activations on the host"):
            copied = some_limits(ranks, count, halves)
    console.print(terminal.summary_table(frontier | copied))
    console.print("flex 0.50: compiled for half of 1f1b's activations", style="dim")
    console.print(_choices(timelines | frontier | copied))
    if pictures.html is not None:
        page.write(timelines | frontier | copied, pictures.html, times.units.time)
    if pictures.drawn:
        from megatron_pp_ext.view import memory_tradeoff

        work = count * max(stage.forward + stage.seconds(Kind.B) for stage in halves.merged(ranks).stages)
        title = f"{ranks} ranks, {count} microbatches"
        line = flex.undominated(list(frontier.values()))
        for path in pictures.drawn:
            memory_tradeoff.draw_schedules(timelines | copied, line, work, path, title, times.units.time)


def _choices(timelines: Mapping[str, Timeline]) -> str:
    """Return which of ``timelines`` to choose for time, for memory, and for time in the memory of 1f1b."""

    def shown(name: str) -> str:
        return f"{name} ({timelines[name].makespan:.5g}, {memory[name]:.4g})"

    memory = {name: max(timeline.peak_microbatches) for name, timeline in timelines.items()}
    in_order = sorted(timelines, key=lambda name: (timelines[name].makespan, memory[name]))
    within = [name for name in in_order if memory[name] <= memory["1f1b"]]
    leanest = min(in_order, key=lambda name: memory[name])
    return (
        f"shortest step: {shown(in_order[0])}; in no more memory than 1f1b: {shown(within[0])}; "
        f"least memory: {shown(leanest)}"
    )


@app.command()
@ask.takes_groups
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of --pipeline-trace, or of mpp schedule or mpp rehearse --trace."),
    ],
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time",
            help="Replay steps of CPUs with the processor time of each action, as on a core for every rank.",
        ),
    ] = False,
    *,
    pictures: ask.Pictures,
) -> None:
    """Show one or several recorded or simulated steps, and what the ranks waited for when they were idle.

    Idle times are in milliseconds: before a rank's first action (warm-up) and after its last
    (cool-down), waiting for an action on another rank to end (unfinished stages) or, when that had ended,
    for its message (late messages), for gradients to be reduced, or for neither (overhead).
    """
    from megatron_pp_ext.schedule.formats import trace_file
    from megatron_pp_ext.schedule.recorded import on_own_cores
    from megatron_pp_ext.view import terminal

    stems = [file.stem for file in files]
    titles = [file.stem if stems.count(file.stem) == 1 else str(file) for file in files]
    with waiting("reading traces"):
        read = [on_own_cores(step) if processor_time else step for step in map(trace_file.read, files)]
    steps = {f"{title}: {step.name}": step for title, step in zip(titles, read, strict=True)}
    units = {step.units for step in read}
    if len(units) > 1:
        raise ValueError(
            f"the traces count time in {' and in '.join(sorted(unit.time for unit in units))}: look at them "
            "one by one"
        )
    with waiting("finding what the ranks waited for"):
        show({title: step.timeline() for title, step in steps.items()}, units.pop(), pictures.paths)
        for title, step in steps.items():
            for table in terminal.recorded_tables(title, step):
                console.print(table)
