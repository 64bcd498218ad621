"""The schedule that is requested, by flags (``job.pipeline``), by a call, by a command or by a search."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from megatron_pp_ext.compiler.limits import Budget, Limit, least_limits, requested_budget
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import FLEX, FORWARD_ONLY, NO_PIPELINE, require_pipeline
from megatron_pp_ext.schedule.families.pipedream import Updates
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, loop, v, wave

COMPILED_CHUNKS = 2
"""The chunks a rank into which a compiled schedule may cut a model where no flag sets another number."""

LARGEST = 2_000_000
"""The most actions that are simulated: a million take one to two minutes and 0.7 GB."""


TRIALS = 1000
"""The number of orders that a search may try on a pipeline of ordinary size; it is lower on larger ones."""


@dataclass(frozen=True, slots=True)
class Option:
    """The options of a feature: the base of a frozen dataclass of its own."""

    splits_backward: ClassVar[bool] = False
    """Whether weight gradients may come later than input gradients, in any order."""
    evaluates: ClassVar[bool] = False
    """Whether the feature is part of evaluations too."""
    is_planned: ClassVar[bool] = False
    """Whether orders depend on what the stages take, so that a search plans them anew for each layout."""

    @property
    def measured_by(self) -> str:
        """The flag, with its value, by whose measurements the order changes during a run; empty for none."""
        return ""

    @property
    def until(self) -> str:
        """Until when the order stays as it is, in words; empty for ever."""
        return ""

    @property
    def word(self) -> str:
        """A short word for the names of candidates of a search; empty for none."""
        return ""

    @property
    def about(self) -> str:
        """Words about it for the line that is printed before the first step; empty for none."""
        return ""

    def caution(self, ranks: int, costs: Costs) -> str:
        """Return a caution about an estimate for ``ranks`` ranks with these ``costs``; empty for none."""
        return ""


@dataclass(frozen=True, slots=True)
class Request:
    """All that decides on a schedule, apart from the costs of its stages; ``compiler.make`` makes it.

    ``schedule`` is a name of the catalogue, one of ``schedule.entry`` or ``csv:FILE``.  ``placements`` has
    one entry, except under ``flex``, whose compiler chooses among several.  ``data`` is the data-parallel
    size, ``microbatches`` are those of an ordinary step.  ``layers`` are the numbers of layers of the stages
    of the finest placement, None where the flags do not give any.  ``from_file`` is the schedule of
    ``csv:FILE``.  ``is_stock`` is true where Megatron's own schedule runs.
    """

    schedule: str
    placements: tuple[Placement, ...]
    microbatches: int
    splits_backward: bool
    data: int = 1
    layers: tuple[int, ...] | None = None
    limit: Limit | Budget | None = None
    """--pipeline-memory-limit (``compiler.limits.requested_budget``), or the memory of each rank itself."""
    updates: Updates | None = None
    from_file: Schedule | None = None
    is_stock: bool = False
    splits_head: bool | None = False
    """Whether every rank is to do a part of the head (``Placement.splits_head``); costs decide under None."""
    free: tuple[float, ...] | None = None
    """For ``auto``, the bytes that every rank has left for a step; None where a step has yet to be run."""
    ordinary: int | None = None
    """The microbatches of an ordinary step, which a fraction as limit is about; None where this is one."""
    trials: int = TRIALS
    """The orders that the compiler may try."""
    options: tuple[Option, ...] = ()
    """The options of features, an object of a class of its own for each (``option``)."""

    def option[T: Option](self, kind: type[T]) -> T | None:
        """Return the options of this class, or None."""
        return next((option for option in self.options if isinstance(option, kind)), None)

    def with_option(self, option: Option) -> Self:
        """Return the request with ``option`` in place of another one of its class."""
        kept_options = (present for present in self.options if type(present) is not type(option))
        return replace(self, options=(*kept_options, option))

    @property
    def may_split_backward(self) -> bool:
        """Whether weight gradients may come later than input gradients."""
        return self.splits_backward or any(option.splits_backward for option in self.options)

    @property
    def ranks(self) -> int:
        return self.placements[0].ranks

    @property
    def placement(self) -> Placement:
        """The placement; ValueError under ``flex``, where the compiler chooses it."""
        (placement,) = self.placements
        return placement

    @property
    def turned_over(self) -> "Request":
        """The same request with the ranks counted from the other end, for all placements that fold."""
        limit, free, file = self.limit, self.free, self.from_file
        if isinstance(limit, tuple):
            limit = limit[::-1]
        elif isinstance(limit, Budget):
            limit = limit.turned_over
        return replace(
            self,
            placements=tuple(
                placement.turned_over if placement.folds else placement for placement in self.placements
            ),
            limit=limit,
            free=None if free is None else free[::-1],
            from_file=file.turned_over if file is not None and file.placement.folds else file,
        )

    def with_loss_on(self, rank: str) -> "Request":
        """Return the request with the ends of every placement that folds on the ``first`` or ``last`` rank.

        Limits by rank are for the same ranks as before.
        """
        file = self.from_file
        if file is not None and file.placement != file.placement.with_loss_on(rank):
            file = file.turned_over
        return replace(
            self,
            placements=tuple(placement.with_loss_on(rank) for placement in self.placements),
            from_file=file,
        )

    @property
    def finest(self) -> Placement:
        """A placement with the most stages, whose costs compiling needs."""
        finest = max(self.placements, key=lambda placement: placement.stages)
        return replace(finest, splits_head=bool(self.splits_head))

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler searches for the order."""
        return catalog.abilities(self.schedule).is_compiled

    def require_few_actions(self) -> int:
        """Return the number of actions; ValueError, before anything is built, for too many to simulate."""
        kinds = 3 if self.splits_backward else 2
        return require_few_actions(self.ranks, self.finest.stages, self.microbatches, kinds)

    def budget(self, costs: Costs) -> Budget:
        """Return the memory budget of each rank, where the finest stages have ``costs``.

        Under ``auto`` that is the free memory of its device, but no less than every order needs.
        """
        if isinstance(self.limit, Budget):
            return self.limit
        if catalog.abilities(self.schedule).measures_memory:
            least = least_limits(costs, self.placement)
            return Budget(least if self.free is None else tuple(map(max, least, self.free)))
        assert self.limit is not None
        return requested_budget(self.limit, self.ranks, self.ordinary or self.microbatches, costs)


def require_few_actions(ranks: int, stages: int, microbatches: int, kinds: int) -> int:
    """Return the actions of ``kinds`` kinds; ValueError for more than are simulated in minutes."""
    per_microbatch = stages * kinds
    actions = per_microbatch * microbatches
    if actions > LARGEST:
        fewer = (
            f"{LARGEST // per_microbatch:,} microbatches or fewer ranks"
            if per_microbatch <= LARGEST
            else "fewer stages"
        )
        raise ValueError(
            f"{ranks:,} ranks with {stages:,} stages and {microbatches:,} microbatches make {actions:,} "
            f"actions, but at most {LARGEST:,}, which take minutes, are simulated: give {fewer}"
        )
    return actions


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
        require_few_actions(ranks, finest.stages, microbatches, 3)
        placements = placements_of(ranks, Costs.unit(finest))
        return Request(name, placements, microbatches, splits_backward=True, limit=limit)
    if can.measures_memory:
        placement = linear(ranks) if (chunks or COMPILED_CHUNKS) % 2 else v(ranks)
        return Request(name, (placement,), microbatches, splits_backward=True)
    if not can.flushes:
        return Request(name, (linear(ranks),), microbatches, splits_backward=False)
    entry = catalog.entry(name)
    return Request(entry.name, (entry.placement(ranks, chunks),), microbatches, entry.splits_backward)


def placements_of(ranks: int, costs: Costs) -> tuple[Placement, ...]:
    """Return all placements on ``ranks`` ranks that the stages of ``costs`` can be merged for.

    Of schedules of equal length the compiler takes the first, so placements with few chunks come first, as
    they mean fewer messages, and those that turn round come before loops.

    Raises ValueError where ``ranks`` does not divide the number of stages.
    """
    chunks, remainder = divmod(len(costs.stages), ranks)
    if remainder or not chunks:
        raise ValueError(
            f"costs are given for {len(costs.stages)} stages, which {ranks} ranks cannot hold evenly: "
            "give one StageCosts for each chunk of each rank"
        )
    placements: list[Placement] = []
    for count in range(1, chunks + 1):
        if chunks % count == 0:
            turns = v(ranks) if count == 2 else wave(ranks, count)
            placements += [linear(ranks)] if count == 1 else [turns, loop(ranks, count)]
    return tuple(placements)


def evaluation(placement: Placement, microbatches: int, options: tuple[Option, ...] = ()) -> Request:
    """Return the request for the forwards of an evaluation with this placement, whichever schedule trains.

    Of the ``options`` of training it has those of features that are part of evaluations.
    """
    unsplit = replace(placement, splits_head=False)
    splits_head = placement.splits_head
    kept_options = tuple(option for option in options if option.evaluates)
    return Request(
        FORWARD_ONLY,
        (unsplit,),
        microbatches,
        splits_backward=False,
        splits_head=splits_head,
        options=kept_options,
    )


def of_sizes(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    splits_head: bool = False,
    options: tuple[Option, ...] = (),
) -> Request:
    """Return the request for schedule ``name`` where all sizes are known, as in a search; also for one rank.

    Raises ValueError for an unknown name and for chunks that the schedule does not accept.
    """
    if ranks == 1:
        return Request(NO_PIPELINE, (linear(1),), microbatches, False, options=options)
    request = named(name, ranks, microbatches, chunks)
    return replace(request, splits_head=splits_head, options=options)
