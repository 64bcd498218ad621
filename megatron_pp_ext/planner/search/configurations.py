"""All legal ways to run a model on a number of GPUs, and the flag to change where there is none."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.features.vocabulary.options import choices
from megatron_pp_ext.job import layers, options
from megatron_pp_ext.job.layers import joined, spread
from megatron_pp_ext.job.sizes import require_divisible
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import Candidate, Recompute, of_option, offered
from megatron_pp_ext.planner.step.model_description import flag
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import NO_PIPELINE
from megatron_pp_ext.schedule.formats import costs_file

_SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
)
"""The sizes that change the costs of a stage; the experts' only in a model with experts."""

KEPT = frozenset((*_SIZES, "expert_tensor_parallel_size", "recompute_granularity"))
"""The arguments that stay as they are."""


def stages(job: Job, arguments: Collection[str]) -> int:
    """Return the number of stages into which the file of --pipeline-costs, or a flag, cuts the model.

    ``arguments`` are those that the user sets.  ValueError where these leave a size open, for tensor
    parallelism other than a search's, and for stages that ranks cannot share evenly.
    """
    file, parallel = job.pipeline.pipeline_costs, job.parallel
    assert file is not None
    sizes = [name for name in _SIZES if job.model.num_experts or name != "expert_model_parallel_size"]
    left_open = [flag(name) for name in sizes if name not in arguments]
    if left_open:
        raise ValueError(
            f"--pipeline-costs {file} has stages of one size, which a search keeps, but not "
            f"{', '.join(left_open)}: give what the stages were measured with"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"--pipeline-costs {file} of stages without --sequence-parallel: a search has it wherever there "
            "is tensor parallelism: measure the stages with it, and give it"
        )
    ranks = parallel.pipeline_model_parallel_size
    # Without a | in it, Megatron cuts a pattern for the ranks, and builds no more stages.
    uncut = ranks if job.model.pattern else len(costs_file.read(file).stages)
    count = layers.stages_described(job) or uncut
    if count % ranks:
        raise ValueError(
            f"--pipeline-costs {file} has {count} stages, which --pipeline-model-parallel-size {ranks} does "
            f"not divide: measure {ranks} or {2 * ranks} stages"
        )
    return count


def described(job: Job, count: int) -> str:
    """Return the fixed and the free sizes of a search of ``count`` measured stages, in words."""
    sizes = ", ".join(f"{flag(name)} {job.value(name)}" for name in _SIZES)
    return (
        f"The {count} stages in {job.pipeline.pipeline_costs} and {sizes} stay; schedules and memory limits "
        "are tried.  Other --gpus and batches have other data-parallel sizes and microbatches."
    )


@dataclass(frozen=True, slots=True)
class Space:
    """The configurations that are searched.

    ``fixed`` names the arguments whose values in ``job`` are the user's and stay; everything else that a
    candidate sets is tried.  Tensor parallelism stays within a node.  Where ``is_uneven``, stages may have
    different numbers of layers.  ``stages`` is the number of stages that were measured, of which those of a
    candidate are made; None where any may be cut from the layers.  Of ``schedules``, those of ``stock`` are
    Megatron's own, since flags refuse --pipeline-schedule.  ``has_pipeline`` leaves out what has none.
    """

    job: Job
    gpus: int
    gpus_per_node: int
    batch: int
    schedules: Sequence[str]
    fixed: Collection[str] = ()
    is_uneven: bool = False
    stages: int | None = None
    stock: tuple[str, ...] = ()
    has_pipeline: bool = False

    def sized(self) -> Iterator[Candidate]:
        """Yield all legal sizes and chunks with every microbatch, whatever the schedule and recomputation."""
        for cut in self.cuts():
            for chunks, _ in self.orders(cut):
                yield from self.refined(replace(cut, chunks=chunks))

    def cuts(self) -> Iterator[Candidate]:
        """Yield every combination of parallel sizes, with a microbatch of 1 and without recomputation."""
        for tensor in self._sizes("tensor_model_parallel_size", min(self.gpus, self.gpus_per_node)):
            for context in self._sizes("context_parallel_size", self.gpus // tensor):
                gpus = self.gpus // tensor // context
                for pipeline in self._sizes("pipeline_model_parallel_size", gpus):
                    data = gpus // pipeline
                    if self.batch % data or pipeline > self._pieces:
                        continue
                    for expert, expert_tensor in self._experts(tensor, data * context):
                        sizes = tensor, context, expert, pipeline, data, 1, self.batch // data
                        cut = Candidate(
                            *sizes,
                            Recompute("none"),
                            expert_tensor=expert_tensor,
                            options=(Pairs(),) if self._is_paired else (),
                            stock=self.stock,
                        )
                        if self._is_paired and expert == 1:
                            continue
                        cut = self.described(cut)
                        if _is_legal(cut.described(self.job), self.gpus // pipeline):
                            yield from self._varied(cut)

    def _varied(self, cut: Candidate) -> Iterator[Candidate]:
        """Yield ``cut`` with all that features may choose in it, of what is asked for."""
        varied = [cut]
        for variants in offered():
            varied = [other for each in varied for other in variants.cuts(self.job, each)]
        yield from varied

    @property
    def _is_paired(self) -> bool:
        """Whether forwards and backwards run in pairs, as the user has to ask for."""
        return self.job.parallel.overlap_moe_expert_parallel_comm

    def refined(self, cut: Candidate) -> Iterator[Candidate]:
        """Yield ``cut`` with every size of a microbatch, the smallest first."""
        samples = cut.microbatches
        micro_batch = self.job.batch.micro_batch_size if "micro_batch_size" in self.fixed else None
        planned = None if cut.planned is None else of_option(cut.planned)
        for size in [micro_batch] if micro_batch else _divisors(samples):
            if samples % size == 0:
                sized = replace(cut, micro_batch=size, microbatches=samples // size)
                if planned is None or planned.permits(self.job, sized):
                    yield sized

    def without_choices(self) -> tuple[Self, tuple[str, ...]]:
        """Return the space without the choices that flags leave open, and the arguments that have some."""
        names = options.left_open(self.job)
        return replace(self, job=self.job.changed(**dict.fromkeys(names))), names

    def recomputes(self, cut: Candidate, chunks: int) -> list[Recompute]:
        """Return the kinds of recomputation, from nothing to everything."""
        model, memory = self.job.model, self.job.memory
        if "recompute_granularity" in self.fixed:
            how, layers = memory.recompute_granularity, memory.recompute_num_layers or None
            fields = how, memory.recompute_method, layers, memory.recompute_modules
            return [Recompute(f"recompute-{how}" if how else "none", *fields)]
        ways = [Recompute("none")]
        if self.job.precision.is_unfused:
            ways.append(Recompute("recompute-attention", "selective", modules=("core_attn",)))
        if modules := self._cheap_modules:
            ways.append(Recompute("recompute-act", "selective", modules=modules))
        # In pairs, where nothing hides a layer's second forward, a few dense layers before experts count too.
        has_mlps = not model.num_experts or (self._is_paired and not all(model.has_experts))
        if has_mlps and not model.add_bias_linear:  # see job/rules/stock.py
            ways.append(Recompute("recompute-mlp", "selective", modules=("mlp",)))
        half = spread(self.job) // (cut.pipeline * chunks) // 2
        if half:
            ways.append(Recompute("recompute-half", "full", "block", half))
        return [*ways, Recompute("recompute-full", "full", "uniform", 1)]

    @property
    def _cheap_modules(self) -> tuple[str, ...]:
        """The modules of a layer with experts that take few seconds for what they free; none without experts.

        Megatron's conditions are in ``TransformerConfig.__post_init__`` of megatron.core.transformer.
        """
        model, precision = self.job.model, self.job.precision
        if not model.num_experts:
            return ()
        is_delayed = precision.fp8 is not None and precision.fp8_recipe == "delayed"
        suited = {
            "moe_act": precision.moe_grouped_gemm and not is_delayed and not precision.fuses_experts,
            "layernorm": not is_delayed,
            "mla_up_proj": self.job.attention.multi_latent_attention,
            "mlp": model.has_dense_layer and not model.add_bias_linear,
        }
        return tuple(name for name, is_suited in suited.items() if is_suited)

    def orders(self, cut: Candidate) -> Iterator[tuple[int, list[str]]]:
        """Yield each number of chunks a rank that the layers fill, with the schedules that accept it."""
        if cut.pipeline == 1:
            if self.has_pipeline:
                return
            if "pipeline_schedule" not in self.fixed and False in choices(self.job):
                yield 1, [NO_PIPELINE]
            return
        flag = "num_virtual_stages_per_pipeline_rank"
        fixed_chunks = self.job.value(flag) if flag in self.fixed else None
        for chunks in self._chunks(cut.pipeline):
            names = [name for name in self.schedules if catalog.entry(name).accepts(chunks)]
            if names and fixed_chunks in (None, chunks):
                yield chunks, names

    def _chunks(self, ranks: int) -> list[int]:
        """Return the numbers of chunks a rank: each gives the longest stage fewer layers than the one before.

        Where stages are even these are the divisors of a rank's layers.
        """
        layers = self._pieces
        longest = range(1, -(-layers // ranks) + 1)
        longest_stages = sorted({-(-layers // (ranks * chunks)) for chunks in longest})
        return [chunks for chunks in longest_stages if self.fills(ranks, chunks)]

    def fills(self, ranks: int, chunks: int) -> bool:
        """Whether the model's layers fill the stages of so many ranks."""
        layers, stages = self._pieces, ranks * chunks
        return stages <= layers if self.is_uneven else layers % stages == 0

    @property
    def _pieces(self) -> int:
        """The layers of which stages are made, or the measured stages that are joined in one."""
        return self.stages or spread(self.job)

    def described(self, cut: Candidate) -> Candidate:
        """Return ``cut`` with measured stages, where flags describe these, joined to as many as it has."""
        if self.stages is None:
            return cut
        measured = joined(self.job, cut.pipeline * cut.chunks)
        layout, pattern = map(measured.get, ("pipeline_model_parallel_layout", "hybrid_layer_pattern"))
        return replace(cut, layout=layout, pattern=pattern)

    def sharing(self, cut: Candidate) -> tuple[bool, ...]:
        """Return whether the ranks of ``cut`` split the head; both where that is to be chosen."""
        return (False,) if cut.pipeline == 1 else choices(self.job)

    def _sizes(self, name: str, most: int) -> list[int]:
        """Return the user's value of argument ``name``, or all that divide the ``most`` GPUs left."""
        if name in self.fixed:
            value = self.job.value(name)
            return [value] if value <= most and most % value == 0 else []
        return _divisors(most)

    def _experts(self, tensor: int, replicas: int) -> list[tuple[int, int | None]]:
        """Return the sizes of expert parallelism, each with that of the experts' tensor parallelism.

        The latter is None where it is as large as the other layers'.
        """
        parallel, count = self.job.parallel, self.job.model.num_experts
        expert_tensors = [size if size < tensor else None for size in _divisors(tensor)] if count else [None]
        if self.job.model.add_bias_linear:  # Megatron refuses to cut experts that have biases
            expert_tensors = expert_tensors[:1]
        if "expert_tensor_parallel_size" in self.fixed:
            expert_tensors = [parallel.expert_tensor_parallel_size or None]
        if "expert_model_parallel_size" in self.fixed:
            return [(parallel.expert_model_parallel_size, expert_tensor) for expert_tensor in expert_tensors]
        sizes = _divisors(count) if count else [1]
        ranks = replicas * tensor
        return [
            (size, expert_tensor)
            for expert_tensor in expert_tensors
            for size in sizes
            if ranks % (size * (expert_tensor or tensor)) == 0
        ]


def record(candidate: Candidate) -> dict[str, Any]:
    """Return the settings of ``candidate``, as files of a search have them."""
    return {**candidate.record(), "is_paired": Pairs() in candidate.options}


def _is_legal(job: Job, stage_ranks: int) -> bool:
    try:
        require_divisible(job, stage_ranks)
    except ValueError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


_NEIGHBOURS = 64
"""The number of nodes, fewer and more, among which a number of GPUs that works is looked for."""

_FIELDS = {
    "tensor_model_parallel_size": "tensor",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
    "pipeline_model_parallel_size": "pipeline",
    "num_virtual_stages_per_pipeline_rank": "chunks",
    "micro_batch_size": "micro_batch",
}
"""The arguments that may rule everything out, and where candidates have them."""


def reason(space: Space) -> str:
    """Return the error for a ``space`` without any candidate.

    It names the flags of the user that are impossible even by themselves, or else those of which any one
    has to change, or else the nearest numbers of GPUs that work.
    """
    names = [name for name in _FIELDS if name in space.fixed]
    for name in names if _works(_without(space, names)) else ():
        alone = _without(space, [other for other in names if other != name])
        if not _works(alone):
            return _to_change(space, [name], alone)
    together = [name for name in names if _works(_without(space, [name]))]
    if together:
        return _to_change(space, together, space)
    return _other_gpus(space)


def _to_change(space: Space, names: Iterable[str], wider: Space) -> str:
    """Return the sentence that one of the flags ``names`` has to change, and to what, given ``wider``."""
    flags, ways = [], []
    for name in names:
        sizes = {
            getattr(candidate, _FIELDS[name]) or candidate.tensor
            for candidate in _without(wider, [name]).sized()
        }
        values = sorted(map(int, sizes))
        flags.append(f"{flag(name)} {space.job.value(name)}")
        ways.append(f"{flag(name)} to {_listed(values)}")
    return (
        f"nothing is legal on {space.gpus} GPUs with {' and '.join(flags)} and --global-batch-size "
        f"{space.batch}: set {', or '.join(ways)}"
    )


def _listed(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _other_gpus(space: Space) -> str:
    distances = range(1, _NEIGHBOURS * space.gpus_per_node)
    below = next((space.gpus - d for d in distances if d < space.gpus and _on(space, space.gpus - d)), None)
    above = next((space.gpus + d for d in distances if _on(space, space.gpus + d)), None)
    nearest = " and ".join(str(number) for number in (below, above) if number)
    return (
        f"no combination of parallel sizes divides --gpus {space.gpus} and --global-batch-size "
        f"{space.batch} for this model" + (f": nearest that work are {nearest}" if nearest else "")
    )


def _on(space: Space, gpus: int) -> bool:
    """Whether ``space`` has a candidate on so many GPUs, which fill their nodes."""
    fills_nodes = gpus <= space.gpus_per_node or gpus % space.gpus_per_node == 0
    return fills_nodes and _works(replace(space, gpus=gpus))


def _without(space: Space, names: Iterable[str]) -> Space:
    return replace(space, fixed=frozenset(space.fixed) - frozenset(names))


def _works(space: Space) -> bool:
    return any(True for _ in space.sized())
