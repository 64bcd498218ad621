"""A job: a model, and how to train it.  It is read once; all that computes takes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self

from megatron_pp_ext.job.parts import Attention, Batch, Model, Parallel
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO, Abilities


@dataclass(frozen=True)
class Memory:
    """The settings of activations and of the optimizer's state.

    ``recompute_num_layers`` is 0 where nobody gives it.
    """

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False
    optimizer: str = "adam"
    sgd_momentum: float = 0.9
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "optim_grads_params"
    muon_num_ns_steps: int = 5
    muon_scalar_optimizer: str = "adam"
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    cpu_offloading_num_layers: int = 0
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"

    @property
    def shards_state(self) -> bool:
        """Whether data-parallel ranks share the optimizer's state, with Muon by whole weights."""
        is_sharded = self.use_megatron_fsdp and self.data_parallel_sharding_strategy != "no_shard"
        return self.use_distributed_optimizer or is_sharded or self.optimizer == "dist_muon"

    @property
    def instances(self) -> int:
        """The copies of the sharded optimizer's state; data-parallel ranks next to each other share one."""
        return self.num_distributed_optimizer_instances if self.use_distributed_optimizer else 1

    @property
    def shards_gradients(self) -> bool:
        """Whether data-parallel ranks share gradients, which are reduced in each microbatch."""
        return self.use_megatron_fsdp and self.data_parallel_sharding_strategy.startswith("optim_grads")

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks share weights, which are gathered for each forward and backward."""
        return self.use_megatron_fsdp and self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def treats_matrices_apart(self) -> bool:
        """Whether the optimizer is for matrices of layers alone, and other weights have one of their own."""
        return self.optimizer not in ("adam", "sgd")

    @property
    def offloaded(self) -> float:
        """The part of the optimizer's state that is on the host, and updated there."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules of a layer that backwards compute again, where not whole layers are."""
        if self.recompute_granularity != "selective":
            return frozenset()
        return frozenset(self.recompute_modules or ("core_attn",))

    @property
    def recomputes_layers(self) -> bool:
        """Whether backwards compute whole layers again."""
        return self.recompute_granularity == "full"

    @property
    def recomputes_first(self) -> bool:
        """Whether these are the first ones of each stage, and not all in groups."""
        return self.recompute_method == "block"

    @property
    def recomputed_together(self) -> int:
        """The layers of such a group, or the first ones of a stage."""
        return self.recompute_num_layers or 1


@dataclass(frozen=True)
class Precision:
    """The formats of numbers, and the kernels that compute with them.

    ``casts_experts_slowly``: the host takes longer to cast the tokens of an expert with one scale for each
    operand, as with Transformer Engine of NVIDIA's containers 25.11 and 26.02; no flag says so.
    """

    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    fp8_param_gather: bool = False
    fp4: str | None = None
    fp4_param_gather: bool = False
    fp32_residual_connection: bool = False
    grad_reduce_in_bf16: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    gradient_accumulation_fusion: bool = True
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    moe_grouped_gemm: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_modules: tuple[Any, ...] | str = ()
    bias_gelu_fusion: bool = True
    bias_swiglu_fusion: bool = True
    use_fused_weighted_squared_relu: bool = False
    use_transformer_engine_op_fuser: bool = False
    moe_paged_stash: bool = False
    casts_experts_slowly: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"

    @property
    def is_half(self) -> bool:
        """Whether weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def weight_size(self) -> int:
        """The bytes of a weight, and of a number in an activation, as the forward uses it."""
        return 2 if self.is_half else 4

    @property
    def gradient_size(self) -> int:
        """The bytes of a gradient in Megatron's buffers: fp32, unless flags or fp16's default differ."""
        if self.bf16:
            return 2 if self.grad_reduce_in_bf16 else 4
        return 2 if self.fp16 and not self.accumulate_allreduce_grads_in_fp32 else 4

    @property
    def uses_fp8(self) -> bool:
        """Whether the products of the layers are computed in FP8, or in FP4."""
        return bool(self.fp8 or self.fp4) and self.transformer_impl != "local"

    @property
    def operand_size(self) -> float:
        """The bytes of a number in an operand of the layers' products.

        In NVFP4 sixteen numbers of half a byte share a scale of a byte.
        """
        return (0.5 + 1 / 16 if self.fp4 else 1) if self.uses_fp8 else self.weight_size

    @property
    def keeps_operands(self) -> bool:
        """Whether weights of layers exist in FP8 or FP4 alone (--fp8-param-gather, --fp4-param-gather)."""
        return self.fp4_param_gather if self.fp4 else self.fp8_param_gather

    @property
    def gathered_size(self) -> float:
        """The bytes of a layer's weight as data-parallel ranks gather it.

        In MXFP8 they gather bf16 and quantize it (``_ParamAndGradBuffer``, core 0.18).
        """
        is_bf16 = not self.fp4 and self.fp8_recipe == "mxfp8"
        return self.operand_size if self.keeps_operands and not is_bf16 else self.weight_size

    @property
    def format(self) -> str:
        """The format of the layers' products, as a system names it (``costs.system.DTYPES``)."""
        if not self.is_half or not (self.fp8 or self.fp4):
            return "bf16" if self.is_half else "fp32"
        return "fp4" if self.fp4 else "fp8"

    @property
    def graphed_modules(self) -> frozenset[str]:
        """The modules of layers that CUDA graphs capture, by Megatron's names; none where that is all."""
        modules = self.cuda_graph_modules
        names = modules.split(",") if isinstance(modules, str) else modules
        return frozenset(str(getattr(name, "name", name)) for name in names) - {"full"}

    @property
    def fuses_experts(self) -> bool:
        """Whether products of experts add biases, activate and cast in their own kernels.

        Transformer Engine fuses so in MXFP8 (transformer_engine.pytorch.ops.fused.grouped_mlp).
        """
        is_mxfp8 = self.uses_fp8 and not self.fp4 and self.fp8_recipe == "mxfp8"
        return self.use_transformer_engine_op_fuser and self.moe_grouped_gemm and is_mxfp8

    @property
    def is_unfused(self) -> bool:
        """Whether attention is computed in single products, which keep its probabilities.

        Transformer Engine has no fused kernel for fp32.
        """
        return self.transformer_impl == "local" or "unfused" in self.attention_backend or not self.is_half

    @property
    def has_loss_in_place(self) -> bool:
        """Whether Transformer Engine computes the loss, whose gradient takes the place of the logits."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te"

    @property
    def words(self) -> str:
        """The formats of weights and of products, such as ``bf16 with FP8 (delayed)``."""
        whole = "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
        if not self.uses_fp8:
            return whole
        return f"{whole} with NVFP4" if self.fp4 else f"{whole} with FP8 ({self.fp8_recipe})"


@dataclass(frozen=True)
class PipelinePart:
    """The pipeline's schedule and its stages, in the words of the flags; ``job.pipeline`` reads them."""

    pipeline_schedule: str | None = None
    pipeline_memory_limit: float | str | None = None
    pipeline_costs: Path | None = None
    pipeline_vocabulary: str | None = None
    pipeline_offload: float | str | None = None
    pipeline_offload_host_bytes: float | None = None
    pipeline_slice_tokens: int | str | None = None
    pipeline_slice_check: str | None = None
    pipeline_update_interval: int | None = None
    pipeline_replicas: str | None = None
    pipeline_loss_rank: str | None = None
    pipeline_vertical_sync: bool = False
    pipeline_allow_waits: bool = False
    num_virtual_stages_per_pipeline_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    @property
    def has_schedule(self) -> bool:
        """Whether one of this package's schedules is to run."""
        return self.pipeline_schedule is not None

    @property
    def can(self) -> Abilities:
        """The abilities of the schedule; of Megatron's own where no flag names one."""
        return catalog.abilities(self.pipeline_schedule)

    @property
    def has_layout(self) -> bool:
        """Whether a layout describes the stages, other than ``auto``, which is yet to be found."""
        return self.pipeline_model_parallel_layout not in (None, AUTO)

    @property
    def finds_layout(self) -> bool:
        """Whether a layout is yet to be found."""
        return self.pipeline_model_parallel_layout == AUTO


@dataclass(frozen=True)
class Job:
    """A model, and how it is trained.

    It and its parts have no slots, since a search changes jobs by the thousand, and a dictionary is copied at
    once.

    ``Job.of`` fills it from whatever has arguments under Megatron's names: those of a command line,
    Megatron's own, those of a config (``job.model_config``).
    """

    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    pipeline: PipelinePart = field(default_factory=PipelinePart)

    @classmethod
    def of(cls, source: object) -> Self:
        """Return the job that ``source`` describes under the names of Megatron's arguments.

        What is absent or None has its default.  A job stays as it is.
        """
        if isinstance(source, cls):
            return source
        values = {name: getattr(source, name, None) for name in _READ}
        return cls().changed(**{name: _plain(value) for name, value in with_derived(values).items()})

    def changed(self, **new: Any) -> Self:
        """Return a job with other ``values``, None for a default; the parts that they leave alone are shared.

        KeyError for a name that no part has.
        """
        by_part: dict[str, dict[str, Any]] = {}
        for name, value in new.items():
            part, default = PLACES[name]
            if part not in by_part:
                by_part[part] = {}
            by_part[part][name] = default if value is None else value
        return _replaced(self, {part: _replaced(getattr(self, part), new) for part, new in by_part.items()})

    def value(self, name: str) -> Any:
        """Return the value of the field ``name``, in whatever part it is."""
        return getattr(getattr(self, PLACES[name][0]), name)

    @property
    def defers_embedding(self) -> bool:
        """Whether gradients of the output layer wait for the end of a step: a schedule turns that off."""
        return self.parallel.defer_embedding_wgrad_compute and not self.pipeline.has_schedule

    @property
    def padded_vocabulary(self) -> int:
        """The rows of the embedding, padded as Megatron does for tensor-parallel ranks to share them."""
        model = self.model
        if model.padded_vocab_size or not model.pad_vocab_size:
            return model.padded_vocab_size or model.vocab_size
        multiple = model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return math.ceil(model.vocab_size / multiple) * multiple


def _replaced[One](original: One, values: Mapping[str, Any]) -> One:
    """Return ``original``, a dataclass, with other ``values``, sooner than ``dataclasses.replace`` does."""
    copy = object.__new__(type(original))
    vars(copy).update(vars(original), **values)
    return copy


PLACES: Mapping[str, tuple[str, Any]] = {
    entry.name: (name, entry.default) for name, part in vars(Job()).items() for entry in fields(part)
}
"""The part that each field is in, and its default."""

OTHER_NAMES = {
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "hybrid_override_pattern": "hybrid_layer_pattern",
    "cuda_graph_scope_deprecated": "cuda_graph_modules",
}
"""Arguments that mean the same as a field, where that one is absent."""

IMPLY = {"recompute_activations", "use_rotary_position_embeddings", "mtp_hybrid_override_pattern"}
"""Arguments that only give a field its value."""

_SCOPE = "cuda_graph_scope"
"""The argument ``cuda_graph_modules`` in older releases."""

_READ = (*PLACES, *OTHER_NAMES, *IMPLY, _SCOPE)


def with_derived(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``arguments`` that a job has, with the values that Megatron derives."""
    values = {name: arguments.get(name) for name in PLACES}
    for other, name in (*OTHER_NAMES.items(), (_SCOPE, "cuda_graph_modules")):
        values[name] = values[name] or arguments.get(other) or values[name]
    pattern, predicting = values["hybrid_layer_pattern"] or "", arguments.get("mtp_hybrid_override_pattern")
    if pattern and predicting and "/" not in pattern:
        pattern += f"/{predicting}" * (values["mtp_num_layers"] or 0)
    if "/" in pattern:
        values.update(hybrid_layer_pattern=pattern, mtp_num_layers=pattern.count("/"))
    if arguments.get("recompute_activations"):
        values["recompute_granularity"] = "selective"
    how = values["recompute_granularity"], values["recompute_method"], values["recompute_num_layers"]
    if how == ("full", "block", 0):  # the first 0 layers of each stage
        values["recompute_granularity"] = None
    if arguments.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    if values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = False
    if isinstance(values["pipeline_schedule"], str):
        values["pipeline_schedule"] = catalog.canonical(values["pipeline_schedule"])
    return values


_PLAIN = (bool, int, float, str, tuple, Path)


def _plain(value: Any) -> Any:
    """Return ``value`` as a field has it: a tuple for a list, and words for what is of Megatron's types."""
    if isinstance(value, list):
        return tuple(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    return value.name if isinstance(value, Enum) else str(value)
