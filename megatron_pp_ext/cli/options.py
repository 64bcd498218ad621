"""The options that several commands share: sizes, costs, output files.

Options that belong together are the fields of a class.  A command that has such a class as a parameter, and
is decorated with ``takes_groups``, has all of its options.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_pp_ext.files import require_folder
from megatron_pp_ext.schedule.costs import MOST, Costs, StageCosts
from megatron_pp_ext.schedule.formats.costs_file import read as read_costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.recorded import SECONDS, UnitNames

Ranks = Annotated[int, typer.Option("-p", "--ranks", help="Pipeline-parallel size.")]

Script = Annotated[
    Path | None,
    typer.Option(help="Your training script.  [default: this package's pretrain_gpt]", metavar="FILE"),
]

Json = Annotated[Path | None, typer.Option(help="Write the numbers.", metavar="FILE")]


def require_at_least(flag: str, value: float, least: float) -> None:
    """Raise ValueError unless ``value``, given by ``flag``, is finite and at least ``least``."""
    if not least <= value < math.inf:
        raise ValueError(f"{flag} is {value:g}, but must be {least:g} or more, and finite: correct it")


@dataclass(frozen=True, slots=True)
class Times:
    """The cost options of a command: the same times for every rank, or a file with the costs of every stage.

    The times are a whole rank's, of which each of its chunks takes an equal part, so that schedules with
    different numbers of chunks compare; with ``chunk_units`` they are times of one chunk.  ``output_layer``
    is the time of its forward, input gradient and weight gradient each.
    """

    f: Annotated[
        float | None, typer.Option("--f", help="Time of a rank's forward of one microbatch.  [default: 1]")
    ] = None
    i: Annotated[
        float | None, typer.Option("--i", help="Time of a rank's input gradient of one.  [default: 1]")
    ] = None
    w: Annotated[
        float | None, typer.Option("--w", help="Time of a rank's weight gradient of one.  [default: 1]")
    ] = None
    hop: Annotated[float | None, typer.Option(help="Time of a message between ranks.  [default: 0]")] = None
    output_layer: Annotated[
        float | None,
        typer.Option(
            help="Time of the output layer's forward, which the last stage has on top.  [default: 0]"
        ),
    ] = None
    pair_time: Annotated[
        float | None,
        typer.Option(
            help="Run forwards and backwards in pairs where the schedule has them; a pair takes this part of "
            "the sum of its two actions, 0.5 to 1."
        ),
    ] = None
    costs_file: Annotated[
        Path | None, typer.Option("--costs", help="Measured costs of every stage, as JSON.", metavar="FILE")
    ] = None
    chunk_units: Annotated[
        bool,
        typer.Option(
            "--chunk-units", help="Times and limits of one chunk, as papers print them, not of a whole rank."
        ),
    ] = False

    def __post_init__(self) -> None:
        flags = {"f": self.f, "i": self.i, "w": self.w, "hop": self.hop, "output-layer": self.output_layer}
        if self.pair_time is not None and not 0.5 <= self.pair_time <= 1:
            raise ValueError(
                f"--pair-time is {self.pair_time:g}, but a pair takes half to all of the sum of its actions: "
                "give 0.5 to 1"
            )
        numbers = {flag: value for flag, value in flags.items() if value is not None}
        options = [*numbers, *(["chunk-units"] if self.chunk_units else [])]
        if self.costs_file is not None and options:
            raise ValueError(f"--costs and --{options[0]} contradict each other: leave one out")
        for flag, value in numbers.items():
            may_be_none = flag in ("hop", "output-layer")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_none):
                rule = "0 or more" if may_be_none else "above 0"
                raise ValueError(f"--{flag} is {value:g}, but must be a finite number {rule}: correct it")
            if value > MOST:
                raise ValueError(f"--{flag} is {value:g}, but must be at most {MOST:g}: lower it")

    def costs(self, placement: Placement) -> Costs:
        """Return the costs of the stages of ``placement``.

        ValueError where that splits the head, if the time of the output layer is not given.
        """
        ranks, chunks = placement.ranks, placement.chunks
        pair = 1.0 if self.pair_time is None else self.pair_time
        if self.costs_file is not None:
            costs = read_costs(self.costs_file, ranks * chunks)
            return costs if self.pair_time is None else replace(costs, pair=pair)
        f, i, w = (1.0 if value is None else value for value in (self.f, self.i, self.w))
        hop, output = self.hop or 0.0, self.output_layer or 0.0
        if self.chunk_units:
            costs = Costs((StageCosts(f, i, w),) * (ranks * chunks), hop)
        else:
            costs = Costs.per_rank(ranks, chunks, forward=f, input_gradient=i, weight_gradient=w, hop=hop)
        costs = replace(costs, pair=pair)
        if not placement.splits_head:
            return costs.with_output_layer(output)
        if not output:
            raise ValueError(
                "the ranks share the output layer, but it takes no time: give --output-layer, "
                "the time of its forward in the unit of --f"
            )
        return costs.with_split_head(output, ranks)

    @property
    def units(self) -> UnitNames:
        """The meaning of 1 in the costs."""
        if self.costs_file is not None:
            return SECONDS
        whole, memory = ("chunk", "chunks") if self.chunk_units else ("rank", "microbatches")
        if (self.f, self.i, self.w) == (None, None, None):
            return UnitNames(f"1 = a {whole}'s F, I or W of one microbatch", memory)
        return UnitNames(f"the unit of --f, --i and --w, which are a {whole}'s", memory)


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures to draw; ValueError if a file has not the suffix of its option."""

    svg: Annotated[Path | None, typer.Option(help="Draw it, to scale without loss.", metavar="FILE")] = None
    png: Annotated[Path | None, typer.Option(help="Draw it, in pixels.", metavar="FILE")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page, to zoom and ask.", metavar="FILE")] = None

    def __post_init__(self) -> None:
        requested: Mapping[str, Path | None] = {".svg": self.svg, ".png": self.png, ".html": self.html}
        for suffix, path in requested.items():
            if path is not None and path.suffix.lower() != suffix:
                raise ValueError(f"--{suffix[1:]} got {path}: end the file's name in {suffix}")
        require_folder(*self.paths)

    @property
    def drawn(self) -> tuple[Path, ...]:
        """The pictures without the page."""
        return tuple(path for path in (self.svg, self.png) if path is not None)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.drawn, *((self.html,) if self.html is not None else ()))


@dataclass(frozen=True, slots=True)
class Files(Pictures):
    """The files that a schedule can be written to; None for those that are not requested."""

    csv: Annotated[
        Path | None, typer.Option(help="Write torch.distributed.pipelining's CSV.", metavar="FILE")
    ] = None
    json: Json = None
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", metavar="FILE")] = (
        None
    )

    def __post_init__(self) -> None:
        # super() would look for the class that dataclass has replaced by one with slots.
        Pictures.__post_init__(self)
        require_folder(self.csv, self.json, self.trace)


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of ``command`` that is a group by the options of the group."""
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            options = inspect.signature(group).parameters
            groups[name] = group, list(options)
            parameters += options.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def wrapped(**arguments: Any) -> None:
        grouped = {
            name: group(**{o: arguments.pop(o) for o in options}) for name, (group, options) in groups.items()
        }
        command(**arguments, **grouped)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    vars(wrapped)["__signature__"] = inspect.Signature(keywords)
    return wrapped
