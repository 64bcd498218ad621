"""The parts of a job: a field has the name of Megatron's argument, and derived values are properties."""

from dataclasses import dataclass

from megatron_pp_ext.job.blocks import LayerBlock, blocks


@dataclass(frozen=True)
class Model:
    """The model that is trained.  A size that nobody gives is 0.

    ``moe_layer_freq`` is a number k, for experts in every k-th layer, or a 1 for each layer with experts.
    """

    num_layers: int = 0
    hidden_size: int = 0
    ffn_hidden_size: int = 0
    num_attention_heads: int = 0
    kv_channels: int = 0
    group_query_attention: bool = False
    num_query_groups: int = 1
    seq_length: int = 0
    max_position_embeddings: int = 0
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    swiglu: bool = False
    quick_geglu: bool = False
    squared_relu: bool = False
    activation_func_clamp_value: float | None = None
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    untie_embeddings_and_output_weights: bool = False
    vocab_size: int = 0
    padded_vocab_size: int = 0
    pad_vocab_size: bool = True
    make_vocab_size_divisible_by: int = 128
    hybrid_layer_pattern: str | None = None
    num_experts: int = 0
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_topk: int = 2
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_latent_size: int = 0
    mtp_num_layers: int = 0
    mtp_use_repeated_layer: bool = False
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int = 0
    mamba_state_dim: int = 128
    heterogeneous_layers_config_path: str | None = None
    heterogeneous_layers_config_encoded_json: str | None = None

    @property
    def expert_capacity(self) -> float | None:
        """The most tokens of an expert, as a part of its average share; None for all."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor

    @property
    def routed_copies(self) -> float:
        """How many times experts get each token, if the router sends every expert the same number.

        A capacity drops tokens beyond it, and padding fills it up.
        """
        capacity = 1.0 if self.expert_capacity is None else self.expert_capacity
        return self.moe_router_topk * (
            capacity if self.moe_pad_expert_input_to_capacity else min(capacity, 1.0)
        )

    @property
    def pattern(self) -> str | None:
        """The layers of --hybrid-layer-pattern, a letter each, with a | between stages; None without one.

        The part after a slash is multi-token prediction (MTP), which belongs to the last stage.
        """
        return self.hybrid_layer_pattern.partition("/")[0] if self.hybrid_layer_pattern else None

    @property
    def predicting_pattern(self) -> str | None:
        """The layers of one depth of MTP, a letter each; None without a pattern."""
        return (self.hybrid_layer_pattern or "").partition("/")[2].partition("/")[0] or None

    @property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """The layers that a file describes one by one; empty where none does."""
        path, text = self.heterogeneous_layers_config_path, self.heterogeneous_layers_config_encoded_json
        if not path and not text:
            return ()
        return blocks(path, text, self.num_attention_heads, self.hidden_size)

    @property
    def has_heterogeneous_layers(self) -> bool:
        """Whether a file or a text describes each layer by itself."""
        return bool(self.heterogeneous_layers_config_path or self.heterogeneous_layers_config_encoded_json)

    @property
    def layers(self) -> int:
        """The number of layers; 0 where nobody gives it."""
        return len(self.pattern.replace("|", "")) if self.pattern else self.num_layers

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts in the place of an MLP, for a model without a pattern."""
        period = self.moe_layer_freq
        if not self.num_experts:
            return (False,) * self.num_layers
        if isinstance(period, tuple):
            return tuple(map(bool, period))
        return tuple(layer % period == 0 for layer in range(self.num_layers))

    @property
    def has_dense_layer(self) -> bool:
        """Whether some layer has an MLP that is not one of experts."""
        return "-" in self.pattern if self.pattern else not (self.num_experts and all(self.has_experts))

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """The number of heads that keys have, and values."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def gates(self) -> int:
        """The products that an MLP begins with: 2 where one of them gates the other."""
        return 2 if self.swiglu or (self.quick_geglu and not self.squared_relu) else 1

    @property
    def mlp_width(self) -> int:
        """The width of an MLP; if none is given, Megatron's default.

        It is 4 times the hidden size, or two thirds of that, in multiples of 64, for a gated MLP.
        """
        gated = 8 * self.hidden_size // 3 // 64 * 64
        return self.ffn_hidden_size or (gated if self.swiglu else 4 * self.hidden_size)

    @property
    def expert_width(self) -> int:
        return self.moe_ffn_hidden_size or self.mlp_width

    @property
    def expert_input(self) -> int:
        """The width in which tokens come to experts and go back: the hidden size, or a latent one."""
        return self.moe_latent_size or self.hidden_size

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba-2 layer; by default as many as make twice the hidden size."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim


@dataclass(frozen=True)
class Parallel:
    """The sizes of every kind of parallelism, and the ways of communication.

    ``expert_tensor_parallel_size`` is 0 where nobody gives it.  Not to begin the tensor-parallel sum of an
    input gradient before the product for the weight gradient is what the fork of Megatron that trained BLOOM
    does (Megatron-DeepSpeed, megatron/mpu/layers.py); no release has a flag
    ``async_tensor_model_parallel_allreduce`` any more.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 0
    tp_comm_overlap: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str = "deepep"
    scatter_gather_tensors_in_pipeline: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0

    @property
    def expert_tensor(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_ranks(self) -> int:
        """The ranks that have one copy of all experts of a layer."""
        return self.expert_model_parallel_size * self.expert_tensor

    @property
    def sequence_ranks(self) -> int:
        """The tensor-parallel ranks that divide the tokens between layers among them."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    def deferred_microbatches(self, microbatches: int) -> int:
        """Return the ``microbatches`` of a step whose gradients of the output layer wait for its end.

        They are the first ones, up to --wgrad-deferral-limit, of which 0 stands for all
        (megatron.core.tensor_parallel.layers).
        """
        if not self.defer_embedding_wgrad_compute:
            return 0
        return min(microbatches, self.wgrad_deferral_limit or microbatches)

    @property
    def divides_messages(self) -> bool:
        """Whether tensor-parallel ranks each send a part of a message that all have, and gather it after.

        Megatron did so by default (arXiv 2104.04473, section 4.1), as DeepSpeed's pipelines do.  Under
        sequence parallelism ranks have parts anyway.
        """
        is_whole = self.tensor_model_parallel_size > 1 and not self.sequence_parallel
        return is_whole and self.scatter_gather_tensors_in_pipeline


@dataclass(frozen=True)
class Batch:
    """The samples of a step; ``micro_batch_size`` is 0 where nobody gives it."""

    micro_batch_size: int = 0
    global_batch_size: int | None = None
    step_batch_size_schedule: str | None = None
    decrease_batch_size_if_needed: bool = False

    @property
    def sizes(self) -> list[int]:
        """The samples of a step, in the order of training: several where the batch grows.

        Empty where no flag gives any: Megatron then takes one microbatch a rank.
        """
        growing = self.step_batch_size_schedule
        if self.global_batch_size is None and growing:
            return [int(step.rpartition(":")[2]) for step in growing.replace(",", " ").split()]
        return [] if self.global_batch_size is None else [self.global_batch_size]
