"""V and wave placement on top of Megatron's interleaved one.

Stock Megatron places chunk c of rank i at stage c * p + i.  A V needs chunk 1 of rank i to be stage
2p - 1 - i instead, which is what the interleaved code builds on rank p - 1 - i; a wave needs the same of
every odd chunk, and with embedding and head on the last rank it is the even ones.  Two mirrors give these
chunks, and no others, the rank p - 1 - i while they are at work:

* ``mirrored_rank`` mirrors the global pipeline rank, for code that reads it from ``parallel_state`` (batches,
  dataset providers, layer numbers in checkpoints);
* ``MirroredGroup`` stands in for the pipeline group in the process-group collection that the chunk is built
  with, and that it keeps (``placed_groups``).  At all other times the collection has the true group: trainers
  take the groups of a rank from its first chunk.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.around import around
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core.built_chunks import finishing
from megatron_pp_ext.integration.core.embedding_copies import tie_embeddings

_RANK = "_MPU_PIPELINE_MODEL_PARALLEL_RANK"
"""Where ``parallel_state`` has the rank that it reports; None there makes it ask the process group."""


class MirroredRank(int):
    """A pipeline rank counted from the other end, kept apart from the true rank of a process."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # in a file it is a number like any other


class MirroredGroup:
    """A process group whose ranks count from the other end within ``mirrored_rank``.

    Everything but ``rank`` is the group's own.  It reports the position of a rank; while a mirrored chunk is
    at work it is not for communication, in which the true ranks must be named.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # torch looks up the members of a group in this table.
        ranks = dist.distributed_c10d._world.pg_group_ranks
        ranks[self] = _MirroredRanks(ranks[group])  # type: ignore[index]

    def rank(self) -> int:
        """The rank of this process, counted from the end while a mirrored chunk is at work."""
        return _as_seen(self._group.rank(), self._group.size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _MirroredRanks(dict[int, int]):
    """The ranks in a ``MirroredGroup`` by global rank."""

    def __getitem__(self, global_rank: int) -> int:
        return _as_seen(super().__getitem__(global_rank), len(self))

    def items(self) -> Any:
        return {global_rank: self[global_rank] for global_rank in self}.items()


def _as_seen(rank: int, ranks: int) -> int:
    return mirror(rank, ranks) if is_mirrored() else rank


def is_mirrored() -> bool:
    """Whether a mirrored chunk is at work."""
    return isinstance(vars(parallel_state)[_RANK], MirroredRank)


@functools.cache
def _mirrored_group(group: dist.ProcessGroup) -> MirroredGroup:
    return MirroredGroup(group)


def placed_groups(collection: Any) -> Any:
    """Return the same groups, whose ``pp`` is the mirrored group while a mirrored chunk is at work."""
    placed = copy.copy(collection)
    placed.__class__ = _placed_kind(collection.__class__)
    return placed


@functools.cache
def _placed_kind(kind: Any) -> Any:
    return kind if "pp" in vars(kind) else type(kind.__name__, (kind,), {"pp": property(_pp, _set_pp)})


def _pp(collection: Any) -> Any:
    group = vars(collection)["pp"]
    return _mirrored_group(group) if is_mirrored() else group


def _set_pp(collection: Any, group: Any) -> None:
    vars(collection)["pp"] = group


def mirror(rank: int, ranks: int) -> MirroredRank:
    """Return ``rank`` of ``ranks`` counted from the other end; a rank that is mirrored already stays."""
    return rank if isinstance(rank, MirroredRank) else MirroredRank(ranks - 1 - rank)


@contextmanager
def mirrored_rank(mirrored: bool = True) -> Iterator[None]:
    """Let ``parallel_state`` report this rank's mirror image in the pipeline, or the true rank, within."""
    before = vars(parallel_state)[_RANK]
    rank = parallel_state.get_pipeline_model_parallel_rank()
    if is_mirrored() is not mirrored:
        other = parallel_state.get_pipeline_model_parallel_world_size() - 1 - rank
        parallel_state.set_pipeline_model_parallel_rank(MirroredRank(other) if mirrored else other)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before)


_is_as_stock = False
"""Whether chunks count as placed as Megatron's own schedules place them."""


@contextmanager
def as_stock() -> Iterator[None]:
    """Let every chunk be where Megatron's own schedules have it within the context."""
    global _is_as_stock
    before, _is_as_stock = _is_as_stock, True
    try:
        yield
    finally:
        _is_as_stock = before


def as_chunk(vp_stage: int | None, pipeline: requested.Pipeline | None = None) -> Any:
    """Return a context in which ``parallel_state`` answers for chunk ``vp_stage`` of this rank."""
    pipeline = pipeline or requested.pipeline()
    if pipeline is None or vp_stage is None or _is_as_stock:
        return nullcontext()
    return mirrored_rank(pipeline.is_mirrored(vp_stage))


@around
def build_chunks_placed(
    stock: Callable[..., Any], build_chunk: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Build the mirrored chunks as the mirror image of this rank builds them; see ``layer_seeds``."""
    _require_chunk_argument(build_chunk)
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.is_per_model:  # then the models' classes place them (``placed_models``)
        return stock(build_chunk, *args, **kwargs)
    if pipeline.placement.has_mirrored:
        build_chunk = functools.partial(build_chunk_placed, build_chunk)
    chunks = stock(finishing(build_chunk), *args, **kwargs)
    tie_embeddings(chunks)
    return chunks


def _require_chunk_argument(build_chunk: Callable[..., Any]) -> None:
    """Raise ValueError if ``build_chunk`` cannot be given which of several chunks it is to build."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    parameters = inspect.signature(build_chunk).parameters.values()
    takes_any = any(
        parameter.name == "vp_stage" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )
    if chunks > 1 and not takes_any:
        name = getattr(build_chunk, "__qualname__", str(build_chunk))
        raise ValueError(
            f"the model provider {name} takes no vp_stage, which tells it which of a rank's {chunks} chunks "
            "to build; choose a schedule with one chunk a rank, such as 1f1b or zb-h1"
        )


def build_chunk_placed(build: Callable[..., Any], pg_collection: Any, *, vp_stage: int, **more: Any) -> Any:
    """Build chunk ``vp_stage`` by ``build``, a mirrored one as the mirror image of this rank builds it.

    ``build`` takes ``pg_collection``, ``vp_stage``, ``pre_process``, ``post_process`` and ``more``.
    """
    pipeline = requested.require()
    if not pipeline.is_mirrored(vp_stage):
        return build(pg_collection=pg_collection, vp_stage=vp_stage, **more)
    stage = pipeline.placement.stage_of(pg_collection.pp.rank(), vp_stage)
    more |= {"pre_process": stage == 0, "post_process": stage == pipeline.placement.stages - 1}
    with mirrored_rank():
        chunk = build(pg_collection=placed_groups(pg_collection), vp_stage=vp_stage, **more)
    stock_state_dict = chunk.sharded_state_dict

    @functools.wraps(stock_state_dict)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        with mirrored_rank():
            return stock_state_dict(*args, **kwargs)

    chunk.sharded_state_dict = sharded_state_dict
    return chunk
