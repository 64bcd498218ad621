"""``mpp estimate``: how long a step takes and what every rank keeps, before a cluster is booked."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
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
from megatron_pp_ext.cli.report import console, require_size, show_by_rank, waiting
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.features.units.microbatches import read_distribution
from megatron_pp_ext.files import require_folder, write_json
from megatron_pp_ext.job import ask_megatron, flag_effects, options
from megatron_pp_ext.job.ask_megatron import Megatron, Question, Verdict
from megatron_pp_ext.job.flag_effects import not_counted
from megatron_pp_ext.job.flag_table import by_name
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.sizes import data_parallel_size, fewest_ranks, smallest_world
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner.search import launch_lines
from megatron_pp_ext.planner.search.launch_lines import Launch

if TYPE_CHECKING:
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
    job = job.with_arguments(micro_batch_size=job.batch.micro_batch_size or 1)
    from megatron_pp_ext.planner.step.comparison import compared
    from megatron_pp_ext.planner.step.estimate import estimate_request
    from megatron_pp_ext.planner.step.model_description import entries

    gpus = world_size or smallest_world(job)
    with ask_megatron.Megatron() as megatron:
        with waiting("estimating"):
            words, job, chosen = with_layout(words, job, gpus)
            words, job = with_choices(words, job, gpus, machine.memory_bytes)
            request = for_world(job, gpus)
            require_size(request)
            launch = Launch([*words, *missing(words)], gpus, machine.gpus_per_node)
            question = ask_megatron.question(
                launch.flags, job, request, gpus, launch_lines.environment(launch.flags)
            )
            if asks:
                megatron.prepare([question])
            estimated = estimate_request(job, machine, request, margin)
            beside = compared(job, machine, request.data, estimated, margin)
        estimated.require_possible(machine)
        if gpus > fewest_ranks(job) and world_size is None:
            ways = job.parallel.expert_ranks
            console.print(
                f"on {gpus} GPUs, the fewest that share experts {ways} ways: --world-size sets others"
            )
        if not job.batch.sizes:
            console.print(
                "no --global-batch-size: a step of one microbatch for each data-parallel rank is estimated, "
                "as Megatron would train"
            )
        counted = entries(job)
        if counted:
            whole, active = (counted[name] / 1e9 for name in ("parameters", "active_parameters"))
            console.print(
                f"{whole:.4g}B parameters in {job.precision.words}, of which a token uses {active:.4g}B"
            )
        show(estimated, request, machine, gpus, job)
        for line in beside.lines if beside else ():
            console.print(line)
        expected = None
        if drawn_from is not None:
            from megatron_pp_ext.planner.step.by_length import steps_by_length

            with waiting("planning steps of drawn lengths"):
                expected = steps_by_length(job, machine, request, drawn_from, draws, seed)
            show_by_length(expected, estimated)
        without = not_counted(job)
        show_not_counted(without)
        verdict = verdicts(megatron, [question])[0].require_accepted() if asks else None
    if chosen:
        console.print(chosen)
    call = None
    if from_recipe is not None:
        from megatron_pp_ext.planner.recipe import Call

        call = Call(job, request)
        _show_call(call)
    else:
        show_launch("To train it:", launch, missing(words))
    if verdict is not None:
        show_verdict(verdict, job)
    if json is not None:
        content = {
            "system": machine.name,
            "gpus": gpus,
            "schedule": request.schedule,
            "microbatches": request.microbatches,
            "data_parallel_size": request.data,
            "precision": job.precision.words,
            **counted,
            **asdict(estimated),
            "by_length": expected and {**asdict(expected), "grounds": _grounds_by_length(estimated)},
            "compared": beside and beside.record(),
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


def with_layout(words: Sequence[str], job: RequestedJob, gpus: int) -> tuple[list[str], RequestedJob, str]:
    """Return flags with a layout in the place of ``auto``, what they ask, and words about the layout."""
    from megatron_pp_ext.planner.layout import requested_layout

    if not job.pipeline.finds_layout:
        return list(words), job, ""
    job, chosen = requested_layout.resolve(job, data_parallel_size(job, gpus), job.model.vocab_size)
    flag, replaced = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
    rest = [
        word for name, values in by_name(words) if name not in (flag, replaced) for word in (name, *values)
    ]
    return [*rest, flag, str(job.pipeline.pipeline_model_parallel_layout)], job, chosen


def with_choices(
    words: Sequence[str], job: RequestedJob, gpus: int, memory: float | None = None
) -> tuple[list[str], RequestedJob]:
    """Return flags with what features choose where these leave it open, and what they ask then.

    ``memory`` are the bytes of a GPU, where they are known.
    """
    choices = options.chosen(
        job, lambda changed: for_world(changed, gpus), lambda: job.padded_vocabulary, memory
    )
    flags = {"--" + name.replace("_", "-"): str(value) for name, value in choices.items()}
    rest = [word for name, values in by_name(words) if name not in flags for word in (name, *values)]
    return [*rest, *chain.from_iterable(flags.items())], job.with_arguments(**choices)


def show(estimated: "Estimate", request: Request, machine: System, gpus: int, job: Job) -> None:
    """Time in a few lines, memory as a table."""
    from megatron_pp_ext.planner.step.error_band import above
    from megatron_pp_ext.planner.step.workload import additions

    tokens = estimated.tokens_per_second / gpus
    replicas = request.updates.replicas if request.updates else None
    copies = f"{request.data} data-parallel"
    if replicas is not None and not replicas.is_straight:
        copies = f"{replicas} replicas of the stages"
    console.print(
        f"{request.schedule} on {gpus} x {machine.name}, {copies}, {request.microbatches} microbatches\n"
        f"step {estimated.step_seconds:.4g} s: pipeline {estimated.pipeline_seconds:.4g} s, reductions and "
        f"update {estimated.other_seconds:.4g} s\n"
        f"MFU {estimated.mfu}, bubble {estimated.bubble:.1%}, {tokens:,.0f} tokens/s a GPU"
    )
    expected = ""
    if estimated.band is not None and (around := estimated.band.of(estimated.step_seconds)) is not None:
        least, most = around
        expected = f"expect {least:.4g} to {most:.4g} s: "
    console.print(f"{expected}{estimated.grounds}")
    for about in filter(None, (estimated.note, *(option.about for option in request.options))):
        console.print(about)
    if request.updates is None and request.ranks > 1 and request.microbatches < request.ranks:
        console.print(
            f"{request.ranks} pipeline ranks share {request.microbatches} microbatches: raise "
            "--global-batch-size",
            style="dim",
        )
    names = [
        name for name, _ in estimated.fullest.components() if any(getattr(r, name) for r in estimated.ranks)
    ]
    show_by_rank(
        "GB on rank",
        {
            name: [f"{getattr(rank, name) / 1e9:.2f}" for rank in estimated.ranks]
            for name in (*names, "total")
        },
    )
    if any(estimated.waiting_bytes):
        most = max(estimated.waiting_bytes)
        rank = estimated.waiting_bytes.index(most)
        gathers = f", which gather operands in {estimated.gather_bytes / 1e9:.2f} GB of the buffers"
        console.print(
            f"up to {most / 1e9:.2f} GB of activations on rank {rank} wait for weight gradients"
            f"{gathers if estimated.gather_bytes else ''}"
        )
    for addition in additions():
        for line in addition.lines(estimated):
            console.print(line)
    fullest, more = estimated.fullest, above(job)
    console.print(
        f"measured peaks were up to {more:.0%} above their estimates: up to "
        f"{(1 + more) * fullest.total / 1e9:.1f} GB on the fullest rank"
    )
    if fullest.total > machine.memory_bytes:
        largest = max(fullest.components(), key=lambda pair: pair[1])
        console.print(
            f"does not fit: rank {estimated.ranks.index(fullest)} needs {fullest.total / 1e9:.1f} GB of "
            f"{machine.memory_bytes / 1e9:.0f} GB, {largest[1] / 1e9:.1f} GB of it {largest[0]}"
        )


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
    if lines:
        console.print(f"a step may be other than estimated, which is made without {'; '.join(lines)}")


def show_launch(title: str, launch: Launch, filled_in: Sequence[str]) -> None:
    """Print the command that starts training, and which of its flags are placeholders for the user's."""
    console.print(title)
    # Not by the console, which would cut or fold words of a line that is to be copied.
    typer.echo(launch.text)
    if filled_in:
        names = ", ".join(name for name, _ in by_name(filled_in))
        console.print(f"Placeholders, to be replaced by yours: {names}", style="dim")
