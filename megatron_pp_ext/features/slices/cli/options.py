"""The option --slices of ``mpp schedule`` and ``mpp compare``."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.schedule.costs import Costs

LEGEND = "/{}: every sequence goes through the pipeline in {} equal slices"


@dataclass(frozen=True, slots=True)
class Slicing:
    """In how many slices sequences are cut; ValueError for less than one."""

    slices: Annotated[
        int | None,
        typer.Option(
            help="Cut every microbatch's sequence into so many equal slices, each of which takes its part of "
            "a microbatch's time and memory.  Attention to the slices before is not counted apart.",
            metavar="K",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"--slices is {self.slices}, but must be 1 or more: raise it")

    @property
    def is_given(self) -> bool:
        """Whether any sequence is cut."""
        return (self.slices or 1) > 1

    def added_to(self, request: Request) -> Request:
        """Return ``request`` with what the option asks for."""
        return request.with_option(Slices(1, self.slices or 1)) if self.is_given else request

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of a slice, where ``costs`` are those of a microbatch."""
        if not self.is_given:
            return costs
        from megatron_pp_ext.features.slices.costs import of_equal_slices

        return of_equal_slices(costs, self.slices or 1)

    def require_size(self, request: Request) -> None:
        """Raise ValueError, before anything is built, for more actions than are simulated."""
        replace(request, microbatches=request.microbatches * (self.slices or 1)).require_few_actions()
