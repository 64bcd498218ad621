"""The options --offload and --copy of ``mpp schedule`` and ``mpp compare``, and their output."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from megatron_pp_ext.cli import flex
from megatron_pp_ext.cli.options import Files, require_at_least
from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.features.offload.copies import share_offloaded, without_copies
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.simulate import Timeline, simulate

_FRACTIONS = (1 / 4, 1 / 3, 1 / 2)
"""The fractions of 1F1B's peak for which ``mpp compare`` compiles with copies."""

LEGEND = "+H: activations wait on the host"


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Which activations wait on the host; ValueError where one of the two options lacks the other."""

    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            help="Let this share of the activations wait on the host, or auto: as many as cost no time, and "
            "for flex as few as keep the limit.  A share may make steps longer.",
            metavar="SHARE",
        ),
    ] = None
    copy: Annotated[
        float | None,
        typer.Option(
            help="Time in which all activations that a rank keeps of a microbatch are copied one way."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.copy is not None:
            require_at_least("--copy", self.copy, 0)
        if (self.offload is None) != (self.copy is None):
            option, other = ("--offload", "--copy") if self.copy is None else ("--copy", "--offload")
            raise ValueError(
                f"{option} is given without {other}: give the share of activations that wait on the host, "
                "and the time of a copy"
            )
        if self.offload not in (None, AUTO):
            try:
                is_share = 0 < float(self.offload) <= 1
            except ValueError:
                is_share = False
            if not is_share:
                raise ValueError(
                    f"--offload is {self.offload}: give a share above 0 and at most 1, or {AUTO}"
                )

    @property
    def is_given(self) -> bool:
        """Whether any activations are to wait on the host."""
        return self.offload is not None

    def added_to(self, request: Request) -> Request:
        if self.offload is None:
            return request
        return request.with_option(OffloadRequest(AUTO if self.offload == AUTO else float(self.offload)))

    def costs(self, costs: Costs, ranks: int) -> Costs:
        """Return ``costs`` with the seconds of copies, from the activations that a rank keeps on average."""
        if self.copy is None:
            return costs
        activations = sum(stage.activation for stage in costs.stages) / ranks
        # Costs whose copies take 0 are those of somebody who does not know what they take.
        seconds = max(self.copy, sys.float_info.min)
        return costs.copied_at(seconds / activations) if activations else costs

    def notes(self, request: Request, costs: CostModel, timeline: Timeline, files: Files) -> Iterator[str]:
        """Yield what to know of the copies of ``timeline``, the step of ``request`` with the options.

        ValueError where ``files`` has one that holds no copies.
        """
        schedule = timeline.schedule
        if not schedule.copies:
            return
        if files.csv is not None:
            raise ValueError("--csv and --offload do not go together, a CSV has no copies: leave one out")
        # A share may have changed the order, too.
        if self.offload == AUTO:
            alone = without_copies(schedule, timeline.costs)
        else:
            alone = simulate(make(request, costs).schedule, timeline.costs)
        before, now = (max(step.peak_microbatches) for step in (alone, timeline))
        yield (
            f"on the host: {share_offloaded(timeline):.1%} of activations; "
            f"peak memory {before:.4g} -> {now:.4g}, "
            f"makespan {alone.makespan:.5g} -> {timeline.makespan:.5g} "
            f"({timeline.makespan / alone.makespan - 1:+.1%})"
        )


def some_limits(ranks: int, microbatches: int, costs: Costs) -> dict[str, Timeline]:
    """Return the shortest steps with copies, for the feasible ones of some fractions of 1F1B's peak.

    They go by the names under which a table has them.
    """
    steps = {}
    for fraction in _FRACTIONS:
        request = named(FLEX, ranks, microbatches, limit=fraction).with_option(OffloadRequest(AUTO))
        with suppress(InfeasibleLimit):
            steps[f"flex {fraction:.2f} +H"] = flex.timeline(replace(request, trials=0), costs)
    return steps
