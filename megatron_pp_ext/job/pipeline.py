"""The pipeline that Megatron's flags request.  All front ends read it here, and none decides it again.

Training, ``mpp estimate``, ``mpp search``, ``mpp schedule`` and ``mpp rehearse`` differ in where their flags
come from and in what the stages cost; what the flags mean is the same for all of them.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pp_ext.compiler.compile import TRIALS, Compiled, compile_schedule, placements_of
from megatron_pp_ext.compiler.limits import Limit, requested_limit
from megatron_pp_ext.job import layers, memory_limit, pairs, refusals, sizes, updates, vocabulary_flag
from megatron_pp_ext.job.chunks import chunks_requested, require_chunks
from megatron_pp_ext.job.csv_schedule import read_csv, require_batches
from megatron_pp_ext.job.stock_limits import has_heterogeneous_layers, refuse_chunks
from megatron_pp_ext.job.updates import Updates
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.families.requirements import require_pipeline as require_ranks
from megatron_pp_ext.schedule.names import FLEX, NO_PIPELINE
from megatron_pp_ext.schedule.placement import Placement, Shape, linear, v, wave

_COMPILED_CHUNKS = 2
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
    forwards and backwards run in pairs.
    """

    schedule: str
    placements: tuple[Placement, ...]
    microbatches: int
    splits_backward: bool
    data: int = 1
    layers: tuple[int, ...] | None = None
    limit: Limit | None = None
    updates: Updates | None = None
    from_file: Schedule | None = None
    is_stock: bool = False
    vocabulary: str | None = None
    is_paired: bool = False

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
    require_ranks(name, ranks, microbatches)
    can = catalog.abilities(name)
    if not can.takes_limit and limit is not None:
        raise ValueError(f"a memory limit has no meaning for {name}: leave it out, or choose {FLEX}")
    if can.takes_limit:
        if limit is None:
            raise ValueError(
                f"{FLEX} needs a memory limit: give a fraction of 1F1B's peak, such as 0.5, or an amount"
            )
        finest = Placement(Shape.LOOP, ranks, chunks or _COMPILED_CHUNKS)
        placements = placements_of(ranks, Costs.unit(finest))
        return Request(name, placements, microbatches, splits_backward=True, limit=limit)
    if can.measures_memory:
        placement = linear(ranks) if (chunks or _COMPILED_CHUNKS) % 2 else v(ranks)
        return Request(name, (placement,), microbatches, splits_backward=True)
    if not can.flushes:
        return Request(name, (linear(ranks),), microbatches, splits_backward=False)
    entry = catalog.entry(name)
    return Request(entry.name, (entry.placement(ranks, chunks),), microbatches, entry.splits_backward)


def for_world(args: Namespace, world_size: int) -> Request:
    """The request of ``args`` on ``world_size`` ranks; ValueError for sizes that do not divide."""
    return read(args, sizes.data_parallel_size(args, world_size))


def read(args: Namespace, data: int, engine: str | None = None) -> Request:
    """The request of ``args`` on ``data`` data-parallel ranks; ValueError, in one line, if it cannot be.

    For ``engine`` see ``refusals.refuse``.
    """
    microbatches, chunks = sizes.microbatches(args, data), chunks_requested(args)
    vocabulary_flag.refuse(args)
    if args.pipeline_schedule is None:
        ranks = args.pipeline_model_parallel_size
        if ranks == 1:
            return Request(NO_PIPELINE, (linear(1),), microbatches, splits_backward=False, data=data)
        stock = named(stock_schedule(args), ranks, microbatches, None if chunks == 1 else chunks)
        refuse_chunks(args, stock.placement.chunks)
        is_paired = pairs.requested(args) and stock.placement.chunks > 1
        return replace(stock, data=data, is_stock=True, is_paired=is_paired)
    require_pipeline(f"--pipeline-schedule {args.pipeline_schedule}", args)
    _require_meaning(args)
    request = _read_schedule(args, chunks, microbatches)
    refuse_chunks(args, request.finest.chunks)
    pairs.refuse(args, request.schedule, request.from_file)
    request = replace(request, is_paired=pairs.requested(args))
    # flex chooses among the placements that have a place for a prediction, if any has.
    suited = tuple(one for one in request.placements if refusals.can_predict(args, one))
    request = replace(request, placements=suited or request.placements)
    is_split = request.splits_backward or request.is_paired or args.pipeline_profile_steps is not None
    refusals.refuse(args, request.placements[0], is_split, engine)
    refusals.refuse_prediction(args, request.placements[0])
    if request.from_file is not None:
        require_batches(args, request.from_file, data)
    request = replace(
        request, data=data, layers=_layers(args, request), vocabulary=vocabulary_flag.requested(args)
    )
    if not catalog.abilities(request.schedule).flushes:
        return replace(request, updates=updates.read(args, microbatches))
    updates.refuse_flags(args)
    return request


def permitted(args: Namespace, names: Sequence[str]) -> list[str]:
    """Return those of the schedules ``names`` that the other flags in ``args`` do not rule out.

    ValueError, with the reason that rules out the first, where none is left.
    """
    found, reason = [], ""
    if pairs.requested(args):
        names = pairs.with_pairs(args, names)
    for name in names:
        request = named(name, 2, 1, limit=1.0 if catalog.abilities(name).takes_limit else None)
        described = Namespace(
            **{**vars(args), "pipeline_schedule": name, "pipeline_model_parallel_size": request.ranks}
        )
        try:
            vocabulary_flag.refuse(described)
            refuse_chunks(described, request.finest.chunks)
            refusals.refuse(described, request.placements[0], request.splits_backward)
            found.append(name)
        except ValueError as error:
            reason = reason or str(error)
    if not found:
        raise ValueError(reason)
    return found


def stock_schedule(args: Namespace) -> str:
    """The name of the schedule that Megatron runs without --pipeline-schedule."""
    return "1f1b" if chunks_requested(args) in (None, 1) else "interleaved"


def require_pipeline(flag: str, args: Namespace) -> None:
    """ValueError, naming ``flag``, where ``args`` request a single pipeline rank."""
    ranks = args.pipeline_model_parallel_size
    if ranks < 2:
        raise ValueError(
            f"{flag} needs a pipeline of 2 ranks or more, got --pipeline-model-parallel-size {ranks}; "
            "set it to 2 or more, or leave the flag out"
        )


def _require_meaning(args: Namespace) -> None:
    """ValueError for a flag of compiled schedules that is missing, or given beside another schedule."""
    name, limit = args.pipeline_schedule, args.pipeline_memory_limit
    can = catalog.abilities(name)
    # Beside a layout, costs serve to choose it and to predict the step.
    has_costs_use = can.is_compiled or layers.layout(args) is not None
    for flag, value in (
        ("--pipeline-memory-limit", limit if not can.takes_limit else None),
        ("--pipeline-costs", args.pipeline_costs if not has_costs_use else None),
    ):
        if value is not None:
            raise ValueError(
                f"{flag} {value} has no meaning for --pipeline-schedule {name}; leave it out, or choose "
                f"{FLEX}"
            )
    if can.takes_limit and limit is None:
        raise ValueError(
            "--pipeline-schedule flex needs --pipeline-memory-limit; give a fraction of 1F1B's peak, such "
            "as 0.5, or a number of bytes, or choose auto"
        )
    if can.measures_memory and args.fp16 and getattr(args, "loss_scale", None) is None:
        raise ValueError(
            "--pipeline-schedule auto measures what memory is free after the first update, and the dynamic "
            "loss scale of --fp16 skips the first ones; use --bf16, set --loss-scale, or choose flex"
        )


def _read_schedule(args: Namespace, chunks: int | None, microbatches: int) -> Request:
    """The schedule and its placements, without what other flags add."""
    name, ranks = args.pipeline_schedule, args.pipeline_model_parallel_size
    can = catalog.abilities(name)
    if can.is_compiled:
        return _read_compiled(args, chunks, microbatches)
    if can.file is not None:
        try:
            schedule = read_csv(can.file, args)
        except OSError as error:
            raise ValueError(f"--pipeline-schedule {name}: {error}") from error
        placement = schedule.placement
        require_chunks(args, name, chunks, placement.chunks, chunks in (None, placement.chunks), "")
        return Request(name, (placement,), microbatches, schedule.splits_backward, from_file=schedule)
    if not can.flushes:
        require_chunks(args, name, chunks, 1, chunks in (None, 1), "")
        return named(name, ranks, microbatches)
    try:
        entry = catalog.entry(name)
    except ValueError as error:
        raise ValueError(f"--pipeline-schedule: {error}") from error
    more = " or more" if entry.accepts(entry.chunks + 1) else ""
    require_chunks(args, entry.name, chunks, entry.chunks, chunks is None or entry.accepts(chunks), more)
    return named(entry.name, ranks, microbatches, chunks)


def _read_compiled(args: Namespace, chunks: int | None, microbatches: int) -> Request:
    """The request for ``flex`` or ``auto``: the compiler chooses among the cuts that the layers allow."""
    name, ranks = args.pipeline_schedule, args.pipeline_model_parallel_size
    can = catalog.abilities(name)
    if chunks is None:
        is_uncut = layers.has_given_ends(args) or layers.pattern(args) or has_heterogeneous_layers(args)
        chunks = _COMPILED_CHUNKS if not is_uncut and layers.spread(args) % (2 * ranks) == 0 else 1
    if can.measures_memory:
        accepted = chunks <= _COMPILED_CHUNKS or layers.stages_described(args) is not None
        require_chunks(args, name, chunks, _COMPILED_CHUNKS, accepted, " or fewer")
    limit = memory_limit.read(args.pipeline_memory_limit, ranks) if can.takes_limit else None
    request = named(name, ranks, microbatches, chunks, limit)
    if can.measures_memory and chunks > _COMPILED_CHUNKS and layers.stages_described(args) is not None:
        return replace(request, placements=(wave(ranks, chunks),))
    if can.takes_limit and (layers.stages_described(args) is not None or layers.has_given_ends(args)):
        # These fix the number of stages, and a number of layers for one end has no meaning under a V.
        given_ends = layers.has_given_ends(args)
        fixed = tuple(
            placement
            for placement in request.placements
            if placement.chunks == chunks and not (given_ends and placement.is_mirrored(1))
        )
        request = replace(request, placements=fixed)
    return request


def _layers(args: Namespace, request: Request) -> tuple[int, ...] | None:
    """The numbers of layers by stage; ValueError where the model's layers do not fill the stages."""
    if not layers.count(args):
        return None
    stages = request.finest.stages
    try:
        return tuple(layers.by_stage(args, stages))
    except ValueError as error:
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} has {stages} stages: {error}"
        ) from error
