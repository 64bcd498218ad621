"""What several commands ask in the same words: sizes, costs, output files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.schedule import costs_file
from megatron_pp_ext.schedule.costs import Costs, StageCosts

Ranks = Annotated[int, typer.Option("-p", "--ranks", help="Pipeline-parallel size.")]
Microbatches = Annotated[int, typer.Option("-m", "--microbatches", help="Microbatches a step.")]

Forward = Annotated[float | None, typer.Option("--f", help="Seconds of a chunk's forward.  [default: 1]")]
InputGradient = Annotated[
    float | None, typer.Option("--i", help="Seconds of a chunk's input gradient.  [default: 1]")
]
WeightGradient = Annotated[
    float | None, typer.Option("--w", help="Seconds of a chunk's weight gradient.  [default: 1]")
]
Hop = Annotated[float | None, typer.Option(help="Seconds of a message between ranks.  [default: 0]")]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", help="Measured costs of every stage, as JSON.", metavar="FILE")
]

Csv = Annotated[Path | None, typer.Option(help="Write torch.distributed.pipelining's CSV.", metavar="FILE")]
Json = Annotated[Path | None, typer.Option(help="Write the numbers.", metavar="FILE")]
Svg = Annotated[Path | None, typer.Option(help="Draw it, to scale without loss.", metavar="FILE")]
Png = Annotated[Path | None, typer.Option(help="Draw it, in pixels.", metavar="FILE")]
Trace = Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", metavar="FILE")]


@dataclass(frozen=True, slots=True)
class Times:
    """The cost flags of a command: the same seconds for every stage, or a file."""

    forward: float | None
    input_gradient: float | None
    weight_gradient: float | None
    hop: float | None
    file: Path | None

    def __post_init__(self) -> None:
        flags = {"f": self.forward, "i": self.input_gradient, "w": self.weight_gradient, "hop": self.hop}
        given = {flag: value for flag, value in flags.items() if value is not None}
        if self.file is not None and given:
            raise ValueError(f"--costs and --{next(iter(given))} contradict each other: leave one out")
        for flag, value in given.items():
            if not math.isfinite(value) or value < 0 or (value == 0 and flag != "hop"):
                rule = "0 or more" if flag == "hop" else "above 0"
                raise ValueError(f"--{flag} is {value:g}, but must be a finite number {rule}: correct it")

    def costs(self, stages: int) -> Costs:
        """The costs of a pipeline of ``stages`` stages."""
        if self.file is not None:
            return costs_file.read(self.file, stages)
        seconds = (
            1.0 if value is None else value
            for value in (self.forward, self.input_gradient, self.weight_gradient)
        )
        return Costs((StageCosts(*seconds),) * stages, self.hop or 0.0)


def pictures(svg: Path | None, png: Path | None) -> tuple[Path, ...]:
    """The picture files asked for; ValueError where flag and suffix differ."""
    asked: Mapping[str, Path | None] = {".svg": svg, ".png": png}
    for suffix, path in asked.items():
        if path is not None and path.suffix.lower() != suffix:
            raise ValueError(f"--{suffix[1:]} got {path}: end the file's name in {suffix}")
    return tuple(path for path in asked.values() if path is not None)
