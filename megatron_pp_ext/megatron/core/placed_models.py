"""Models of megatron.core, built for the placement of the pipeline in force: V and wave on top of
interleaving.

Stock Megatron places chunk c of rank i at stage c * p + i.  A V needs chunk 1 of rank i to be stage 2p - 1 -
i instead, which is what the interleaved code builds on rank p - 1 - i; a wave needs the same of every odd
chunk, and with embedding and head on the last rank it is the even ones.  Two mirrors give these chunks, and
no others, the rank p - 1 - i while they are at work: ``mirrored_rank`` and ``MirroredGroup``.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.around import around, bound
from megatron_pp_ext.megatron import patching, requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.core.chunk_pipelines import finishing
from megatron_pp_ext.megatron.patching import hook, substitute
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.setting_error import SettingError

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

    It stands in for the pipeline group in the process-group collection that a chunk is built with, and that
    it keeps (``placed_groups``).  At all other times the collection has the true group: trainers take the
    groups of a rank from its first chunk.
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
    """Let ``parallel_state`` report this rank's mirror image in the pipeline, or the true rank, within.

    Code that takes the pipeline rank from ``parallel_state`` sees it: batches, dataset providers, layer
    numbers in checkpoints.
    """
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
    _tie_embeddings(chunks, pipeline)
    return chunks


def _tie_embeddings(chunks: Sequence[torch.nn.Module], pipeline: Pipeline) -> None:
    if pipeline.has_embedding_with_head:
        from megatron_pp_ext.megatron.core.embedding_copies import tie_embeddings

        tie_embeddings(chunks)


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


_LAYERS, _ENDS = "config vp_stage pp_rank", "ignore_virtual vp_stage"
_DECODER = "config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank"
_MTP = "config spec use_transformer_engine vp_stage pp_rank"
_PLACED = "layers, embedding and head of a chunk, for whoever asks while it is not at work"


@substitute("megatron.core.transformer.transformer_block:get_num_layers_to_build", _LAYERS, _PLACED)
@substitute("megatron.core.transformer.transformer_layer:get_transformer_layer_offset", _LAYERS, _PLACED)
@substitute("megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec", _DECODER, _PLACED)
@substitute("megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec", _MTP, _PLACED)
@substitute("megatron.core.parallel_state:is_pipeline_first_stage", _ENDS, _PLACED)
@substitute("megatron.core.parallel_state:is_pipeline_last_stage", _ENDS, _PLACED)
def by_placement(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``stock`` answer for the chunk that its ``vp_stage`` names, wherever it is called.

    A ``pp_rank`` in the call is a true rank, unless it comes from a mirrored group or ``parallel_state``,
    which are mirrored already and marked so.  With ``ignore_virtual`` the answer is for the whole rank.

    While a mirrored chunk is at work ``parallel_state`` reports the mirrored rank, and these functions follow
    it.  Whoever asks at another time, to export weights or to look for the loss, gets the same answer by this
    hook.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def placed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        vp_stage = arguments["vp_stage"]
        pipeline = chunk_pipelines.of_config(arguments.get("config"))
        if pipeline is None or vp_stage is None or arguments.get("ignore_virtual"):
            return stock(*args, **kwargs)
        if arguments.get("pp_rank") is not None and pipeline.is_mirrored(vp_stage):
            size = parallel_state.get_pipeline_model_parallel_world_size()
            arguments["pp_rank"] = mirror(arguments["pp_rank"], size)
        with as_chunk(vp_stage, pipeline):
            return stock(*call.args, **call.kwargs)

    return placed


_unfinished: list[torch.nn.Module] = []
"""The chunks of the model that is being built."""


_GPT = (
    "self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process "
    "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights position_embedding_type "
    "rotary_percent rotary_base rope_scaling rope_scaling_factor scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor mtp_block_spec pg_collection vp_stage"
)
_RATIOS = (
    "vocab_size max_sequence_length hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern "
    "pre_process post_process fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights "
    "position_embedding_type rotary_percent rotary_base scatter_embedding_sequence_parallel "
    "seq_len_interpolation_factor pg_collection"
)
_HYBRID = f"self config hybrid_stack_spec {_RATIOS} hybrid_layer_pattern vp_stage"
_MAMBA = f"self config mamba_stack_spec {_RATIOS}"


_WHY = "chunks of a V or wave from the other end, whoever builds them"


@hook("megatron.core.models.gpt.gpt_model:GPTModel.__init__", (_GPT, f"{_GPT} logit_dtype"), _WHY)
@hook(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    (_HYBRID, f"{_HYBRID} logit_dtype"),
    _WHY,
    # Newer ones make a MambaModel of a HybridModel.
    before={
        "megatron.core.models.mamba.mamba_model:MambaModel.__init__": (
            _MAMBA,
            f"{_MAMBA} vp_stage",
            f"{_MAMBA} hybrid_layer_pattern vp_stage",
        )
    },
)
def build_placed(stock: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Build a chunk of a model for its placement.

    ValueError where the process groups or the config are made for another number of ranks or chunks than the
    schedule's.

    Megatron's own trainer builds all chunks of a rank in one function (``build_chunks_placed``).  Other
    trainers have builders of their own, and all of them make each chunk by the model's class.
    """
    pipeline = requested.pipeline()
    if pipeline is None or not pipeline.is_per_model:
        if pipeline is None:
            chunk_pipelines.claim(bound(stock, model, *args, **kwargs).arguments["config"], None)
            chunk_pipelines.remember(model, None)
        stock(model, *args, **kwargs)
        return
    call = bound(stock, model, *args, **kwargs)
    arguments = call.arguments
    groups = copy.copy(arguments.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups())
    chunk = arguments.get("vp_stage")
    from megatron_pp_ext.job.model_config import in_words_of_call

    with in_words_of_call():
        require_sizes(pipeline, groups.pp.size(), arguments["config"], chunk)
    chunk_pipelines.claim(arguments["config"], pipeline)
    if pipeline.has_embedding_with_head:
        # Both copies of a tied weight are on one rank (``sum_tied_gradients``): there is nobody to exchange
        # it with, whichever ranks Megatron's group has, which may be older than the schedule.
        groups.embd = None

    def build(**placed: Any) -> Any:
        arguments.update(placed)
        stock(*call.args, **call.kwargs)
        return model

    if chunk is None:
        build(pg_collection=groups)
    else:
        build_chunk_placed(build, groups, vp_stage=chunk)
    chunk_pipelines.remember(model, pipeline)
    with in_words_of_call():
        _collect(model, chunk or 0, pipeline)


def _collect(model: torch.nn.Module, chunk: int, pipeline: Pipeline) -> None:
    """Finish a rank's chunks after the last one, since they are built in order."""
    if chunk == 0:
        _unfinished.clear()
    _unfinished.append(model)
    if len(_unfinished) < pipeline.placement.chunks:
        return
    chunks = tuple(_unfinished)
    _unfinished.clear()
    chunk_pipelines.finish(chunks)
    _tie_embeddings(chunks, pipeline)
    patching.apply_imported()  # before any weights are imported into the chunks


def require_sizes(pipeline: Pipeline, ranks: int, config: Any, chunk: int | None) -> None:
    """Raise ValueError unless a model of ``config`` in ``ranks`` pipeline ranks fits the placement."""
    placement = pipeline.placement
    if ranks != placement.ranks:
        raise SettingError(
            f"{pipeline.name} was installed for {placement.ranks} pipeline ranks, and this model's pipeline "
            f"has {ranks}; give megatron_pp_ext.install --pipeline-ranks={ranks}"
        )
    if pipeline.moves_stages and not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            f"{pipeline.name} needs Megatron's global process groups (parallel_state), and this model has "
            "groups of its own alone; leave use_decentralized_pg out, or choose a schedule with one chunk a "
            "rank, such as 1f1b or zb-h1"
        )
    built = config.virtual_pipeline_model_parallel_size or 1
    if built != placement.chunks:
        chunks = placement.chunks if placement.chunks > 1 else None
        raise ValueError(
            f"{pipeline.name} has {placement.chunks} chunks a rank, and this model's config says {built}; "
            f"set virtual_pipeline_model_parallel_size to {chunks}{_or_one_chunk(built)}"
        )
    if chunk is None and placement.chunks > 1:
        raise ValueError(
            f"{pipeline.name} has {placement.chunks} chunks a rank, and whoever builds this model does not "
            f"say which one it is; give it vp_stage{_or_one_chunk(1)}"
        )


def _or_one_chunk(chunks: int) -> str:
    return ", or choose a schedule with one chunk a rank, such as 1f1b or zb-h1" if chunks == 1 else ""
