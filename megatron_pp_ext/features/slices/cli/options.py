"""The options --slices and --slice-tokens of ``mpp schedule`` and ``mpp compare``."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from megatron_pp_ext.cli.options import require_at_least
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features.lengths.length_costs import OVERHEAD
from megatron_pp_ext.features.slices.options import Slices
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.names import AUTO

LEGEND = "/{}: every sequence goes through the pipeline in {} equal slices"


@dataclass(frozen=True, slots=True)
class Slicing:
    """How sequences are cut into slices; ValueError for options that contradict each other."""

    slices: Annotated[
        int | None,
        typer.Option(
            help="Cut every microbatch's sequence into so many equal slices, each of which takes its part of "
            "a microbatch's time and memory.  Attention to the slices before is not counted apart.",
            metavar="K",
        ),
    ] = None
    slice_tokens: Annotated[
        str | None,
        typer.Option(
            help="With --lengths, cut documents longer than C tokens into slices, and let shorter ones go "
            "together up to C; auto chooses C by the simulated step.",
            metavar="C",
        ),
    ] = None
    unit_overhead: Annotated[
        float | None,
        typer.Option(
            help="With --slice-tokens, the tokens that each slice or pack costs on top of its own, for "
            f"kernels that are slower where they are small.  [default: {OVERHEAD:.0f}]",
            metavar="TOKENS",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"--slices is {self.slices}, but must be 1 or more: raise it")
        if self.slices is not None and self.slice_tokens is not None:
            raise ValueError("--slices and --slice-tokens contradict each other: leave one out")
        if self.slice_tokens not in (None, AUTO) and not (
            self.slice_tokens.isdecimal() and int(self.slice_tokens) > 0
        ):
            raise ValueError(
                f"--slice-tokens is {self.slice_tokens}: give a whole number from 1 on, or {AUTO}"
            )
        if self.unit_overhead is not None:
            if self.slice_tokens is None:
                raise ValueError("--unit-overhead is given without --slice-tokens: give both")
            require_at_least("--unit-overhead", self.unit_overhead, 0)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a unit; None where they are to be chosen."""
        return None if self.slice_tokens in (None, AUTO) else int(self.slice_tokens)

    @property
    def overhead(self) -> float:
        """The tokens that a unit costs on top of its own."""
        return OVERHEAD if self.unit_overhead is None else self.unit_overhead

    def require_lengths(self, are_given: bool) -> None:
        """Raise ValueError for options that lack ``--lengths``, or contradict it."""
        if self.slice_tokens is not None and not are_given:
            raise ValueError("--slice-tokens is given without --lengths, the lengths of documents: give both")
        if self.slices is not None and are_given:
            raise ValueError("--slices is for equal microbatches: give --slice-tokens with --lengths")

    @property
    def is_given(self) -> bool:
        """Whether any sequence is cut."""
        return (self.slices or 1) > 1

    def added_to(self, request: Request) -> Request:
        return request.with_option(Slices(1, self.slices or 1)) if self.is_given else request

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of a slice, where ``costs`` are those of a microbatch."""
        if not self.is_given:
            return costs
        from megatron_pp_ext.features.slices.slice_costs import of_equal_slices

        return of_equal_slices(costs, self.slices or 1)

    def require_size(self, request: Request) -> None:
        """Raise ValueError, before anything is built, for more actions than are simulated."""
        replace(request, microbatches=request.microbatches * (self.slices or 1)).require_few_actions()
