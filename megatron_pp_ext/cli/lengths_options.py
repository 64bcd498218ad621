"""The options about the lengths of microbatches, which several commands have."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from megatron_pp_ext.cli import options as ask
from megatron_pp_ext.features.units.microbatches import Microbatches, read_step
from megatron_pp_ext.features.units.rates import EQUAL_AT, LengthCosts
from megatron_pp_ext.schedule.costs import Costs

MICROBATCHES = 8
"""The microbatches of a step where no option gives any."""

StepMicrobatches = Annotated[
    int | None,
    typer.Option(
        "-m", "--microbatches", help=f"Microbatches a step.  [default: {MICROBATCHES}, or those of --lengths]"
    ),
]


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's documents; ValueError for options that lack them."""

    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Document lengths in tokens, a list for each microbatch: [[4096, 1200], [8000], ...], or a "
            "line for each.  --f, --i and --w are then those of a microbatch of mean length without "
            "attention.",
            metavar="FILE",
        ),
    ] = None
    equal_at: Annotated[
        float | None,
        typer.Option(
            help="Length of a document whose attention takes as long as all else of its forward.  "
            f"[default: {EQUAL_AT}]",
            metavar="TOKENS",
        ),
    ] = None
    plan_budget: Annotated[
        float | None,
        typer.Option(help="Milliseconds of a core for the search of an order.  [default: 50]"),
    ] = None

    def __post_init__(self) -> None:
        for flag, value in (("--equal-at", self.equal_at), ("--plan-budget", self.plan_budget)):
            if value is None:
                continue
            if self.lengths is None:
                raise ValueError(f"{flag} is given without --lengths, the lengths of documents: give both")
            ask.require_at_least(flag, value, 1)

    @cached_property
    def microbatches(self) -> Microbatches | None:
        """The microbatches of the file, or None without one."""
        return None if self.lengths is None else read_step(self.lengths)

    def count(self, requested: int | None) -> int:
        """Return the microbatches of a step; ValueError where -m contradicts the file."""
        if self.microbatches is None:
            return MICROBATCHES if requested is None else requested
        if requested not in (None, len(self.microbatches)):
            raise ValueError(
                f"-m is {requested}, but {self.lengths} has {len(self.microbatches)} microbatches: leave -m "
                "out"
            )
        return len(self.microbatches)

    @property
    def budget(self) -> float:
        """The seconds of a core for a search."""
        return (self.plan_budget or 50.0) / 1e3

    def costs(self, times: ask.Times, costs: Costs) -> LengthCosts:
        """Return ``costs``, those that ``times`` asks for, by the lengths of documents.

        ValueError for a costs file that does not state for which sizes it is.
        """
        assert self.microbatches is not None
        equal_at = EQUAL_AT if self.equal_at is None else self.equal_at
        if times.output_layer:
            raise ValueError("--output-layer and --lengths do not go together: leave one out")
        if times.costs_file is None:
            mean = sum(self.microbatches.tokens) / len(self.microbatches)
            return LengthCosts.with_attention(costs, mean, equal_at)
        length, documents = costs.sizes.get("seq_length"), costs.sizes.get("micro_batch_size", 1)
        if not length:
            raise ValueError(
                f"{times.costs_file} does not state the length of its costs, which --lengths needs: add "
                '"sizes": {"seq_length": ..., "micro_batch_size": ...}'
            )
        return LengthCosts.measured(costs, length, documents, equal_at)
