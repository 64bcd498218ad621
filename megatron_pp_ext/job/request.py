"""A pipeline as it is requested, by flags (``job.pipeline``), by a call or by a command."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_pp_ext.compiler.compile import TRIALS, Compiled, compile_schedule, placements_of
from megatron_pp_ext.compiler.limits import Limit, requested_limit
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import require_pipeline
from megatron_pp_ext.schedule.names import FLEX
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, v

if TYPE_CHECKING:
    from megatron_pp_ext.job.updates import Updates

COMPILED_CHUNKS = 2
"""The chunks a rank into which a compiled schedule may cut a model where no flag sets another number."""


@dataclass(frozen=True, slots=True)
class Request:
    """A pipeline as the flags request it.

    ``schedule`` is a name of the catalogue, one of ``schedule.names`` or ``csv:FILE``.  ``placements`` has
    one entry, except under ``flex``, whose compiler chooses among several.  ``data`` is the data-parallel
    size, ``microbatches`` are those of an ordinary step.  ``layers`` are the numbers of layers of the stages
    of the finest placement, None where the flags do not give any.  ``limit`` is --pipeline-memory-limit (see
    ``compiler.limits.requested_limit``), ``from_file`` the schedule of ``csv:FILE``.  ``is_stock`` is true
    where Megatron's own schedule runs.  ``vocabulary`` is --pipeline-vocabulary.  ``is_paired`` is true where
    forwards and backwards run in pairs.  ``offload`` is --pipeline-offload, a share or ``auto``.
    """

    schedule: str
    placements: tuple[Placement, ...]
    microbatches: int
    splits_backward: bool
    data: int = 1
    layers: tuple[int, ...] | None = None
    limit: Limit | None = None
    updates: "Updates | None" = None
    from_file: Schedule | None = None
    is_stock: bool = False
    vocabulary: str | None = None
    is_paired: bool = False
    offload: float | str | None = None

    @property
    def ranks(self) -> int:
        """The pipeline-parallel size."""
        return self.placements[0].ranks

    @property
    def placement(self) -> Placement:
        """The placement; ValueError under ``flex``, where compiling settles it."""
        (placement,) = self.placements
        return placement

    @property
    def finest(self) -> Placement:
        """A placement with the most stages: compiling needs the costs of these."""
        return max(self.placements, key=lambda placement: placement.stages)

    def limited(self, costs: Costs) -> tuple[Limit, Costs]:
        """The memory limit of ``flex`` as an amount for all ranks or each, and the costs that it counts."""
        assert self.limit is not None
        return requested_limit(self.limit, self.ranks, self.microbatches, costs)

    def compile(self, costs: Costs, trials: int = TRIALS) -> Compiled:
        """Compile ``flex`` for ``costs`` of the stages of ``finest``; see ``compile_schedule`` for errors."""
        limit, counted = self.limited(costs)
        return compile_schedule(
            self.ranks, self.microbatches, counted, limit, placements=self.placements, trials=trials
        )


def named(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, limit: Limit | None = None
) -> Request:
    """Return the request for schedule ``name`` where no flags are given.

    ``chunks`` is the number of stages a rank; None leaves it to the schedule.  ValueError for an unknown
    name, for chunks that the schedule does not accept, and for a limit that it has no use for or lacks.
    """
    require_pipeline(name, ranks, microbatches)
    can = catalog.abilities(name)
    if not can.takes_limit and limit is not None:
        raise ValueError(f"a memory limit has no meaning for {name}: leave it out, or choose {FLEX}")
    if can.takes_limit:
        if limit is None:
            raise ValueError(
                f"{FLEX} needs a memory limit: give a fraction of 1F1B's peak, such as 0.5, or an amount"
            )
        finest = Placement(Shape.LOOP, ranks, chunks or COMPILED_CHUNKS)
        placements = placements_of(ranks, Costs.unit(finest))
        return Request(name, placements, microbatches, splits_backward=True, limit=limit)
    if can.measures_memory:
        placement = linear(ranks) if (chunks or COMPILED_CHUNKS) % 2 else v(ranks)
        return Request(name, (placement,), microbatches, splits_backward=True)
    if not can.flushes:
        return Request(name, (linear(ranks),), microbatches, splits_backward=False)
    entry = catalog.entry(name)
    return Request(entry.name, (entry.placement(ranks, chunks),), microbatches, entry.splits_backward)
