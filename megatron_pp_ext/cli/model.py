"""The model that a planner's command describes: by name, by file, by flags after ``--``, or all of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.report import console, waiting
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.search.launch_lines import one_a_line

if TYPE_CHECKING:
    from megatron_pp_ext.planner.described import Described
    from megatron_pp_ext.planner.recipe import Recipe

Flags = Annotated[list[str] | None, typer.Argument(help="After --: Megatron's flags.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A name from `mpp models`, a Hugging Face config.json or its folder, or a JSON of Megatron's "
        "names.  Flags after -- add to it and replace its own.",
        metavar="NAME|FILE",
    ),
]
GlobalBatchSize = Annotated[int | None, typer.Option(help="Sequences a step.")]
SeqLength = Annotated[int | None, typer.Option(help="Tokens a sequence.")]
PrintFlags = Annotated[
    bool, typer.Option("--print-flags", help="Print the model's Megatron flags, and do no more.")
]


@app.command()
def models() -> None:
    """List the models that --model knows by name."""
    from megatron_pp_ext.planner.described import named, names

    table = Table("--model", "model", "parameters", "tokens a sequence")
    models = list(map(named, names()))
    for model in models:
        billions = f"{model.parameters / 1e9:.4g} billion"
        table.add_row(model.name, model.title, billions, str(model.described.values["seq_length"]))
    console.print(table)
    console.print("Other names of these:")
    for model in models:
        if model.other_names:
            console.print(f"  {model.name}: {', '.join(model.other_names)}")
    console.print("--print-flags shows a model's flags.  A Hugging Face config.json does as well as a name.")


def described(
    flags: Sequence[str] | None,
    model: str | None,
    sizes: Mapping[str, int | None] | None = None,
    complete: Callable[[RequestedJob], RequestedJob] = lambda job: job,
    recipe: "Recipe | None" = None,
) -> tuple[RequestedJob, list[str]]:
    """Return the job of the described model, or that of ``recipe``, with its vocabulary, and its flags.

    See ``planner.described.read``, and ``Described.counted`` for ``complete``.
    """
    from megatron_pp_ext.planner import described as planners
    from megatron_pp_ext.planner.described import FROM_HUGGING_FACE, FULL_PRECISION, size

    description = planners.read(flags or (), model, sizes, recipe=recipe)
    _notify(description.notes)
    job = description.counted(complete)
    if not job.model.vocab_size and job.flags.tokenizer_type in FROM_HUGGING_FACE:
        job = job.with_arguments(vocab_size=size(job))
    elif not job.model.vocab_size:
        import warnings

        with waiting("asking Megatron's tokenizer"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron_pp_ext.megatron.start_up import vocabulary

            job = job.with_arguments(vocab_size=vocabulary(job))
    if not job.precision.is_half:
        _notify([FULL_PRECISION])
    return job, description.words


def to_be_started(
    flags: Sequence[str] | None,
    model: str | None,
    script: Path | None = None,
    sizes: Mapping[str, int | None] | None = None,
    recipe: "Recipe | None" = None,
) -> "Described":
    """Return the model of a job that is started from here, or that of ``recipe``, and print its notes.

    ``script`` is the user's training script, whose own flags cannot be checked; ``sizes`` are given by
    options, under the names of arguments.
    """
    from megatron_pp_ext.planner import described as planners

    job = planners.read(
        flags or (),
        model,
        sizes,
        has_other_flags=script is not None,
        recipe=recipe,
    )
    _notify(job.notes)
    return job


def _notify(sentences: Sequence[str]) -> None:
    """Print ``sentences`` to stderr, so that stdout has only the result."""
    for sentence in sentences:
        typer.echo(sentence, err=True)


def print_flags(words: Sequence[str]) -> None:
    """Print flags for a shell, one a line."""
    typer.echo(one_a_line(words))
