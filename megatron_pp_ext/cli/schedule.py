"""The commands that simulate a schedule and show it: ``mpp schedule`` and ``mpp simulate``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli import lengths as by_length
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.lengths_options import Lengths, StepMicrobatches
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import bound_of, console, report, require_size
from megatron_pp_ext.compiler.compile import TRIALS
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.offload.cli.options import Offloading
from megatron_pp_ext.features.pairs.options import paired
from megatron_pp_ext.features.units import cli as in_units
from megatron_pp_ext.features.units.cli import Slicing
from megatron_pp_ext.job.call import with_loss_on
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.simulate import simulate


@app.command()
@ask.takes_groups
def schedule(
    name: Annotated[str, typer.Argument(help="A name from `mpp list`.")],
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
            "messages."
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
    lengths: Lengths,
    offload: Offloading,
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
        make_it, about = flex.made, "compiling flex"
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
    request = paired(request, times.pair_time is not None or (can.takes_limit and costs.pair < 1))
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
        timeline = simulate(result.schedule, slicing.costs(costs.merged(result.schedule.placement.stages)))
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
