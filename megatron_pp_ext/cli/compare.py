"""The command that compares all schedules."""

from dataclasses import replace

from megatron_pp_ext.cli import lengths as by_length
from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.lengths_options import Lengths, StepMicrobatches
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import console, print_units
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.features.offload.cli.options import LEGEND, Offloading, some_limits
from megatron_pp_ext.features.pairs.options import Pairs, paired
from megatron_pp_ext.features.units import cli as in_units
from megatron_pp_ext.features.units.cli import LEGEND as SLICES_LEGEND
from megatron_pp_ext.features.units.cli import Slicing
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import CostModel
from megatron_pp_ext.schedule.placement import loop
from megatron_pp_ext.schedule.simulate import simulate


@app.command()
@ask.takes_groups
def compare(
    ranks: ask.Ranks = 4,
    microbatches: StepMicrobatches = None,
    *,
    times: ask.Times,
    lengths: Lengths,
    offload: Offloading,
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
            rows[" +P"] = paired(request)
        if times.output_layer:
            rows[" +S"] = replace(request, splits_head=True)
        if slicing.is_given:
            rows[f" /{slicing.slices}"] = slicing.added_to(request)
        with waiting(f"simulating {request.schedule}"):
            for ending, row in rows.items():
                costs = model.of(row.finest)
                schedule = make(row, model).schedule
                timelines[f"{request.schedule}{ending}"] = simulate(
                    schedule, slicing.costs(costs) if schedule.units else costs
                )
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
    if pictures.paths:
        from megatron_pp_ext.view import memory_tradeoff

        work = count * max(stage.forward + stage.seconds(Kind.B) for stage in halves.merged(ranks).stages)
        title = f"{ranks} ranks, {count} microbatches"
        line = flex.undominated(list(frontier.values()))
        for path in pictures.paths:
            memory_tradeoff.draw_schedules(timelines | copied, line, work, path, title, times.units.time)
