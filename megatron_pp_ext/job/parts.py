"""A job's model, how it is spread over ranks, and its batch; a field has the name of Megatron's argument."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pp_ext.json_input import naming, parse, read

_FIX = "give the config.json of a model whose block_configs describe each layer"


class Half(NamedTuple):
    """A layer's attention or MLP: absent, a single product in its place, or the full one.

    ``size`` is the number of query groups, or the width of the MLP; 0 for the model's own.
    """

    is_left_out: bool = False
    is_linear: bool = False
    size: int = 0


class LayerBlock(NamedTuple):
    """One layer."""

    attention: Half
    mlp: Half


@lru_cache(maxsize=64)
def blocks(path: str | None, text: str | None, heads: int, hidden: int) -> tuple[LayerBlock, ...]:
    """Return the layers that ``text`` describes, or the file at ``path``, of a model of these sizes.

    ValueError for a file that cannot be read, and for content that describes no layers.

    They are its ``block_configs``, each with ``attention`` and ``ffn`` or ``mlp``, in the words of
    Llama-Nemotron's config.json (``HeterogeneousTransformerConfig`` in
    megatron.core.transformer.heterogeneous; arXiv 2411.19146).
    """
    source = "--heterogeneous-layers-config-encoded-json" if text else f"{path}"
    with naming(source):
        try:
            content = parse(text, _FIX) if text else read(Path(path or ""), _FIX)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror}): {_FIX}") from None
        layers = content.get("block_configs") if isinstance(content, dict) else None
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise ValueError(f"has no list of block_configs: {_FIX}")
        return tuple(
            LayerBlock(
                _half(layer.get("attention"), "num_query_groups", "n_heads_in_group", lambda n: heads // n),
                _half(
                    layer.get("ffn") or layer.get("mlp"),
                    "ffn_hidden_size",
                    "ffn_mult",
                    # Two thirds of it times the hidden size, in multiples of 256.
                    lambda multiple: -(-int(2 * multiple * hidden / 3) // 256) * 256,
                ),
            )
            for layer in layers
        )


def _half(entry: Any, name: str, other: str, derived: Callable[[Any], int]) -> Half:
    """Return the half that ``entry`` describes, whose size is ``name`` or ``derived`` from ``other``."""
    if not isinstance(entry, Mapping) or (name not in entry and other not in entry):
        raise ValueError(f"a layer has no {name} and no {other}: {_FIX}")
    size, from_other = entry.get(name), entry.get(other)
    if size is None and from_other is not None:
        size = derived(from_other)
    return Half(bool(entry.get("no_op")), bool(entry.get("replace_with_linear")), int(size or 0))


_FREQUENCY = int | tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """The kinds of attention with the sizes of each.  A size that nobody gives is 0.

    ``window_size`` are the tokens before and after a token that it sees, as a text or as two numbers;
    ``window_attn_skip_freq`` is a number k, for windows in all layers but every k-th, or a 1 for each layer
    with one, and ``linear_attention_freq`` the same for linear attention.
    """

    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    attention_output_gate: bool = False
    softmax_type: str = "vanilla"
    window_size: str | tuple[int, ...] | None = None
    window_attn_skip_freq: _FREQUENCY | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mla_down_proj_fusion: bool = False
    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int = 0
    dsa_indexer_head_dim: int = 0
    dsa_indexer_topk: int = 0
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    dsa_indexer_loss_coeff: float = 0.0
    dsa_indexer_use_sparse_loss: bool = False
    dsa_kernel_backend: str = "none"
    linear_attention_freq: _FREQUENCY | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def letter(self, number: int) -> str:
        """Return the kind of layer ``number``, counted from 1, as --hybrid-layer-pattern writes it.

        * is multi-head attention, + multi-latent, D sparse attention, G a gated delta net.
        """
        variant = self.experimental_attention_variant
        if variant == "gated_delta_net" and _applies(self.linear_attention_freq or 1, number):
            return "G"
        if variant == "dsa":
            return "D"
        return "+" if self.multi_latent_attention else "*"

    def window(self, number: int, length: int) -> int:
        """Return how many of ``length`` tokens one sees in layer ``number`` at most, itself among them."""
        has_one = self.window_attn_skip_freq is None or _applies(self.window_attn_skip_freq, number)
        return min(length, seen(self.window_size) or length) if has_one else length

    def chooses(self, number: int) -> bool:
        """Whether sparse attention in layer ``number`` has an indexer, which serves layers after it too."""
        after = max(0, number - max(1, self.dsa_indexer_skip_topk_offset))
        return after % self.dsa_indexer_topk_freq == 0

    @property
    def compresses_at_once(self) -> bool:
        """Whether one product compresses queries, keys and values."""
        return self.mla_down_proj_fusion and self.q_lora_rank > 0

    @property
    def norms_hidden(self) -> bool:
        """Whether the norm of queries is one of the hidden state, since they are not compressed."""
        return self.multi_latent_attention and self.qk_layernorm and not self.q_lora_rank

    @property
    def query_width(self) -> int:
        """The width of a query in multi-latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def seen(window: object) -> int | None:
    """Return the number of tokens in ``window``, such as 127,0: a token and those before it; None for all."""
    before = str(window).strip("()").partition(",")[0]
    return int(before) + 1 if before.isdigit() else None


def sees_later(window: object) -> bool:
    """Whether a token sees any after itself in ``window``, such as 127,0; a -1 stands for all."""
    return str(window).strip("()").partition(",")[2].strip() not in ("", "0")


def _applies(frequency: _FREQUENCY, number: int) -> bool:
    """Whether ``frequency`` has a 1 for layer ``number``; as a number k it has a 0 for each k-th one.

    Layers of multi-token prediction, which come after those of the list, are as its last one.
    """
    if isinstance(frequency, tuple):
        return bool(frequency[min(number, len(frequency)) - 1])
    return number % frequency != 0


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

    ``action_starts`` are the starts of a kernel for which the host needs as long as for an action besides its
    kernels: 17 in a Megatron of 2023, and none that could be seen in later ones (docs/ratios.md).
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
    overlap_p2p_comm: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str = "deepep"
    scatter_gather_tensors_in_pipeline: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    action_starts: int = 0
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
