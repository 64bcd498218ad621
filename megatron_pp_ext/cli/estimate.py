"""``mpp estimate``: how long a step takes and what every rank keeps, before a cluster is booked."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
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
from megatron_pp_ext.cli.report import console, show_by_rank, waiting
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.features.units.microbatches import read_distribution
from megatron_pp_ext.files import require_folder, write_json
from megatron_pp_ext.job import ask_megatron, flag_effects
from megatron_pp_ext.job.ask_megatron import Megatron, Question, Verdict
from megatron_pp_ext.job.flag_effects import caution, not_counted
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.search.launch_lines import Launch, about_placeholders, environment

if TYPE_CHECKING:
    from megatron_pp_ext.planner.estimated_job import EstimatedJob
    from megatron_pp_ext.planner.recipe import Call, Recipe
    from megatron_pp_ext.planner.step.by_length import StepsByLength
    from megatron_pp_ext.planner.step.estimate import Estimate

_SYSTEMS = "a100-80g, h100, h200, b200, b300, gb200, gb300, mi300x, or what mpp calibrate wrote."

SystemName = Annotated[str, typer.Option("--system", help=_SYSTEMS)]
AsksMegatron = Annotated[
    bool,
    typer.Option("--ask/--no-ask", help="Ask the installed Megatron whether it starts what is recommended."),
]
Margin = Annotated[
    float, typer.Option(help="For what allocators leave unused: a fraction of what comes and goes.")
]


@app.command()
def estimate(
    flags: Flags = None,
    system: Annotated[
        str | None,
        typer.Option(
            help=f"{_SYSTEMS}  [default: the GPU in the name of --recipe, or h100]",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="GPUs.  [default: those in the name of --recipe, or the fewest that hold the model]"
        ),
    ] = None,
    model: Model = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe of Megatron-Bridge, or a function of yours that returns a ConfigContainer: all of "
            "its job is taken.  Flags after -- add to it and replace its own.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    print_only: PrintFlags = False,
    margin: Margin = 0.05,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Document lengths in tokens to draw from, as a JSON list: the step that is to be expected "
            "where microbatches of --seq-length tokens are packed with such documents.",
            metavar="FILE",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(help="Steps drawn from --lengths.")] = 8,
    seed: Annotated[int, typer.Option(help="Which steps are drawn.")] = 0,
    asks: AsksMegatron = True,
    json: ask.Json = None,
) -> None:
    """Estimate a training step of a Megatron model: its time, and the memory of every rank.

    mpp estimate --model llama3-8b --world-size 64 -- --pipeline-model-parallel-size 4 ...
    """
    sizes = {"global_batch_size": global_batch_size, "seq_length": seq_length}
    from_recipe = None if recipe is None else _recipe(recipe, world_size)
    if from_recipe is not None:
        world_size, asks = world_size or from_recipe.gpus, False  # Bridge does not read Megatron's flags
        system = system or from_recipe.system
    if print_only:
        print_flags(to_be_started(flags, model, sizes=sizes, recipe=from_recipe).words)
        return
    ask.require_at_least("--margin", margin, 0)
    ask.require_at_least("--draws", draws, 1)
    drawn_from = None if lengths is None else read_distribution(lengths)
    if world_size is not None and world_size < 1:
        raise ValueError(f"--world-size is {world_size}, but must be 1 or more: raise it")
    require_folder(json)
    machine = systems.read(system or "h100")
    job, words = described(flags, model, sizes, recipe=from_recipe)
    from megatron_pp_ext.planner.estimated_job import PlacedJob
    from megatron_pp_ext.planner.step.model_description import entries

    with ask_megatron.Megatron() as megatron:
        with waiting("estimating"):
            placed = PlacedJob.of(job, words, machine, world_size)
            job, request, launch = placed.job, placed.request, placed.launch
            question = ask_megatron.question(
                launch.flags, job, request, placed.gpus, environment(launch.flags)
            )
            if asks:
                megatron.prepare([question])
            shown = placed.estimated(margin)
        show(shown)
        expected = None
        if drawn_from is not None:
            from megatron_pp_ext.planner.step.by_length import steps_by_length

            with waiting("planning steps of drawn lengths"):
                expected = steps_by_length(job, machine, request, drawn_from, draws, seed)
            show_by_length(expected, shown.step)
        without = not_counted(job)
        show_not_counted(without)
        verdict = verdicts(megatron, [question])[0].require_accepted() if asks else None
    if placed.about_layout:
        console.print(placed.about_layout)
    call = None
    if from_recipe is not None:
        from megatron_pp_ext.planner.recipe import Call

        call = Call(job, request)
        _show_call(call)
    else:
        show_launch("To train it:", launch, placed.placeholders)
    if verdict is not None:
        show_verdict(verdict, job)
    if json is not None:
        content = {
            "system": machine.name,
            "gpus": placed.gpus,
            "schedule": request.schedule,
            "microbatches": request.microbatches,
            "data_parallel_size": request.data,
            "precision": job.precision.words,
            **entries(job),
            **asdict(shown.step),
            "by_length": expected and {**asdict(expected), "grounds": _grounds_by_length(shown.step)},
            "compared": shown.comparison and shown.comparison.record(),
            "not_counted": without,
            "megatron": verdict and verdict.record(),
            **(launch if call is None else call).record(),
        }
        write_json(json, content)


def _recipe(name: str, gpus: int | None) -> "Recipe":
    """Return the recipe ``name`` on ``gpus`` GPUs, or those in its name; its imports take seconds."""
    from megatron_pp_ext.planner.recipe import read

    with waiting("reading the recipe"):
        return read(name, gpus)


def _show_call(call: "Call") -> None:
    """Print what a script of Megatron-Bridge calls before it trains."""
    console.print("To train it, before Megatron-Bridge's pretrain or finetune:")
    for line in call.lines:
        typer.echo(line)


def verdicts(megatron: Megatron, questions: Sequence[Question]) -> list[Verdict]:
    """Return Megatron's verdicts on ``questions``, which take seconds where they are not stored."""
    with waiting("asking Megatron"):
        return [megatron.ask(question) for question in questions]


def show_verdict(verdict: Verdict, job: RequestedJob) -> None:
    """Report that Megatron accepts a job, or why nobody knows, and what it reads otherwise than the costs."""
    unread = set() if job.is_set("--use-megatron-fsdp") else {"data_parallel_sharding_strategy"}
    for name in sorted(verdict.differs.keys() & flag_effects.counted() - unread):
        console.print(
            f"Megatron {verdict.release} reads {flag_effects.flag(name)} as {verdict.differs[name]}, which "
            "is not what was counted: give the flag a value"
        )
    console.print(verdict.line)


def show(shown: "EstimatedJob") -> None:
    """Print the time of a step in a few lines, its memory as a table, and other steps to compare it with."""
    for line in (*shown.sizes, shown.title, *shown.times):
        console.print(line)
    show_by_rank("GB on rank", shown.memory_table)
    for line in (*shown.about_memory, *(shown.comparison.lines if shown.comparison else ())):
        console.print(line)


def show_by_length(expected: "StepsByLength", estimated: "Estimate") -> None:
    """Print the steps to be expected for documents that were drawn.

    ``estimated`` is the step of sequences that are alike, whose other seconds they take too.
    """
    other_seconds = estimated.other_seconds
    console.print(
        f"{expected.draws} steps of drawn lengths, seed {expected.seed}: the heaviest microbatch is "
        f"{expected.heaviest:.2f} of the mean; step, by the order of microbatches"
    )
    orders = {
        "given": expected.given,
        "by the rule": expected.rule,
        "searched": expected.search,
        "searched, documents balanced over replicas": expected.balanced,
    }
    for name, pipeline in orders.items():
        if pipeline is not None:
            gain = (expected.given + other_seconds) / (pipeline + other_seconds) - 1
            console.print(
                f"  {name}: {pipeline + other_seconds:.4g} s"
                + (f" ({gain:+.1%})" if abs(gain) >= 5e-4 else "")
            )
    console.print(f"  {_grounds_by_length(estimated)}")


def _grounds_by_length(estimated: "Estimate") -> str:
    """Return the caution about such steps: no published run had documents of different lengths."""
    # Steps of measured stages, which have no band, are none of documents.
    assert estimated.band is not None
    return str(estimated.band.beyond("with documents of different lengths"))


def show_not_counted(lines: Sequence[str]) -> None:
    """Report how the step differs from its estimate, which is made without these flags."""
    for line in caution(lines):
        console.print(line)


def show_launch(title: str, launch: Launch, filled_in: Sequence[str]) -> None:
    """Print the command that starts training, and which of its flags are placeholders for the user's."""
    console.print(title)
    # Not by the console, which would cut or fold words of a line that is to be copied.
    typer.echo(launch.text)
    if about := about_placeholders(filled_in):
        console.print(about, style="dim")
