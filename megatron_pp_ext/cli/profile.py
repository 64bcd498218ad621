"""``mpp profile``: measures or shows the cost of each layer of a model."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.cli.commands import app
from megatron_pp_ext.cli.model import Model, PrintFlags, print_flags, to_be_started
from megatron_pp_ext.cli.progress import waiting
from megatron_pp_ext.cli.report import console
from megatron_pp_ext.files import require_folder
from megatron_pp_ext.jobs.command import short_run, training, whole_number, words_of
from megatron_pp_ext.jobs.failure import reason

if TYPE_CHECKING:
    from megatron_pp_ext.schedule.formats.profile import Profile

_STEPS, _MICROBATCHES = 4, 8
"""The first step warms up; medians are of the 24 microbatches of the others."""


@app.command()
def profile(
    file: Annotated[
        Path, typer.Argument(help="The profile, which is written if flags follow and read otherwise.")
    ],
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --, the flags of a Megatron model to measure.")
    ] = None,
    model: Model = None,
    print_only: PrintFlags = False,
    script: ask.Script = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the profile that was read as JSON.", metavar="FILE")
    ] = None,
) -> None:
    """Measure every layer of a Megatron model in a few training steps of one process, or show a profile.

    mpp profile gpt.json --model llama3-8b -- --num-layers 2   measures, on the GPU or else the CPU; the
    training log goes to gpt.log

    mpp profile graph.txt   shows a profile; PipeDream's format is read too
    """
    from megatron_pp_ext.schedule.formats import profile_file

    if print_only:
        print_flags(to_be_started(flags, model).words)
        return
    if flags or model is not None:
        _measure(file, to_be_started(flags, model, script).words, script)
    elif script is not None:
        raise ValueError(f"--script {script} is for measuring: give --model or the model's flags after --")
    measured = profile_file.read(file)
    if json is not None:
        profile_file.write(measured, json)
    _show(measured)


def training_flags(file: Path, flags: list[str]) -> list[str]:
    """Return the flags of a few steps of the model on one rank, which write their profile to ``file``.

    Raises ValueError for flags that contradict this.
    """
    words = words_of(flags)
    if "--save" in words:
        raise ValueError("--save would write a checkpoint of the profiled steps: leave it out")
    changed = {
        "--pipeline-model-parallel-size": 1,
        "--global-batch-size": _MICROBATCHES * whole_number(words, "--micro-batch-size"),
        "--profile-pipeline": file,
    }
    return short_run(flags, _STEPS, changed)


def _measure(file: Path, flags: list[str], script: Path | None) -> None:
    """Train for a few steps, with the log next to ``file``; ValueError if the run fails."""
    from megatron_pp_ext.jobs.process import run

    require_folder(file)
    log = file.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        written = Path(folder, file.name)
        words = training_flags(written, flags)
        with waiting(f"training for {_STEPS} steps, with the log in {log}"):
            status = run(training(words, ranks=1, script=script), log)
        if status or not written.exists():
            cause = reason(log.read_text(encoding="utf-8", errors="replace"))
            raise ValueError(
                f"the profiled run ended with status {status} and no profile: {cause} ({log}); correct the "
                "model's flags"
            )
        shutil.copyfile(written, file)
    console.print(f"The training log is in {log}", style="dim")


def _show(model: "Profile") -> None:
    names = ("forward ms", "backward ms", "output MB", "kept MB", "weights MB")
    columns = (Column(name, justify="right") for name in names)
    table = Table(Column("layer", overflow="fold"), *columns, box=SIMPLE_HEAD)
    for layer in model.layers:
        table.add_row(
            layer.name,
            f"{layer.forward_seconds * 1e3:.4g}",
            f"{layer.backward_seconds * 1e3:.4g}",
            f"{layer.activation_bytes / 1e6:.4g}",
            f"{layer.kept_bytes / 1e6:.4g}",
            f"{layer.parameter_bytes / 1e6:.4g}",
        )
    console.print(table)
    shape = "a chain" if model.is_chain else f"a graph with {len(model.edges)} edges"
    console.print(f"{len(model.layers)} layers, {shape}, {model.seconds:.6g} s a microbatch")
