"""One layer of each kind of attention on a CPU rank, as Megatron builds it: its weights and saved bytes.

Megatron makes some kinds of Transformer Engine's modules and of CUDA kernels alone.  What stands in for them
here has the same weights and saves for its backward what they save: a norm its input, a kernel its operands.
"""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.support import ranks

# isort: split
import torch
from megatron.core import mpu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_pp_ext import cpu
from tests.support.kept_bytes import kept_bytes, share_storage

common, gdn = (getattr(gated_delta_net, name, gated_delta_net) for name in ("common", "gdn"))
"""The modules with Megatron's functions of gated delta nets: one module in older releases."""


class Layer(NamedTuple):
    """The number of a layer's weights, the bytes that its forward keeps, and the bytes that wait for its W.

    These are, of each product with a weight, its input, once where products share it, and the gradient of its
    output.
    """

    parameters: int
    kept: int
    waiting: int


def build(*models: Sequence[str]) -> list[Layer]:
    """Return the first layer of each of ``models``, which flags describe, without its MLP."""
    (layers,) = ranks.run_ranks(_build_all, 1, [cpu.with_cpu_flags(flags) for flags in models])
    return layers


def _build_all(rank: int, models: Sequence[list[str]]) -> list[Layer]:
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(1)
    use_stand_ins()
    return [_build(flags) for flags in models]


def _build(flags: list[str]) -> Layer:
    from megatron.training import arguments  # which loops of their own do without

    with pytest.MonkeyPatch.context() as patch:
        # With local layers these kinds are refused where this package's hooks are installed.
        patch.setattr("sys.argv", ["train.py", *flags, "--transformer-impl", "transformer_engine"])
        args = arguments.parse_args()
        arguments.validate_args(args)
    args.transformer_impl = "local"
    config = arguments.core_transformer_config_from_args(args)
    is_linear = config.experimental_attention_variant == "gated_delta_net"
    has_variant = config.experimental_attention_variant is not None
    if is_linear:
        has_variant = bool(variants.get_linear_attention_pattern(config)[0])
    spec = _of_variant(config) if has_variant else _standard(config)
    layer = build_module(spec, config=config, layer_number=1).to(config.params_dtype)
    shape = args.seq_length, args.micro_batch_size, config.hidden_size
    hidden = torch.randn(shape, dtype=config.params_dtype, requires_grad=True)
    positions = _rotary(args, config)
    waiting, parameters = _Waiting(layer), list(layer.parameters())
    saved_bytes = kept_bytes(
        parameters, lambda: layer(hidden, attention_mask=None, rotary_pos_emb=positions)[0]
    )
    return Layer(sum(weight.numel() for weight in parameters), saved_bytes, waiting.bytes())


class _Waiting:
    """The operands of weight gradients in ``layer``."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        for part in layer.modules():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear | Duplicated):
                part.register_forward_hook(self._look)

    def _look(self, part: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._inputs[inputs[0].data_ptr()] = inputs[0]
            self._outputs.append(outputs[0])

    def bytes(self) -> int:
        """Return their bytes."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in [*self._inputs.values(), *self._outputs]
        )


def _rotary(args: Any, config: Any) -> torch.Tensor | None:
    if config.multi_latent_attention or args.position_embedding_type not in ("rope", "yarn"):
        return None
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(
        config.kv_channels, args.rotary_percent, cp_group=mpu.get_context_parallel_group()
    )
    return embedding(args.seq_length)


def _standard(config: Any) -> ModuleSpec:
    submodules = gpt_layer_specs.get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    attention = submodules.self_attention
    if config.multi_latent_attention and config.mla_down_proj_fusion:
        attention.module = FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
    return _layer(attention)


def _of_variant(config: Any) -> ModuleSpec:
    if config.experimental_attention_variant == "dsa":
        return _layer(variants.get_dsa_module_spec_for_backend(config, Backend()))
    backend = Backend()
    parts = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_linear(),
        out_norm=backend.layer_norm(),
        out_proj=backend.row_parallel_linear(),
    )
    return _layer(ModuleSpec(module=GatedDeltaNet, submodules=parts))


def _layer(attention: Any) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
        ),
    )


class _Saving(torch.autograd.Function):
    """A computation that saves its operands alone, and runs again for their gradients, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *operands: torch.Tensor) -> Any:
        ctx.compute = compute
        ctx.save_for_backward(*operands)
        return compute(*operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.compute(*operands)
        if len(gradients) == 1:
            outputs = (outputs,)
        return None, *torch.autograd.grad(outputs, operands, gradients, allow_unused=True)


class Norm(torch.nn.Module):
    """A norm in one kernel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        self.weight, self.bias, self.eps = norm.weight, getattr(norm, "bias", None), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        return _Saving.apply(self._normed, hidden, *self.parameters())

    def _normed(self, hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        shape = weights[0].shape
        if self.bias is None:
            return torch.nn.functional.rms_norm(hidden, shape, weights[0], self.eps)
        return torch.nn.functional.layer_norm(hidden, shape, weights[0], weights[1], self.eps)


class Duplicated(torch.nn.Module):
    """A product with a weight that every tensor-parallel rank has."""

    def __init__(self, inputs: int, outputs: int, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias, as Megatron's linear layers return it."""
        return torch.nn.functional.linear(hidden, self.weight), None


class Core(DotProductAttention):
    """Megatron's own attention with the sizes of heads that multi-latent attention gives it."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class Backend(LocalSpecProvider):
    """Megatron's local modules, and stand-ins for Transformer Engine's."""

    def linear(self) -> type:
        """The product whose weight is not divided."""
        return Duplicated

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm in one kernel."""
        return Norm

    def core_attention(self) -> type:
        """The attention with heads of two sizes."""
        return Core


def use_stand_ins() -> None:
    gpt_layer_specs.LocalSpecProvider = Backend
    L2Norm.forward = _l2_normed
    random.FP8GlobalStateManager = Namespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **how: contextlib.nullcontext()
    Attention._apply_output_gate = _output_gate
    absorbed_mla.TELinear = Duplicated
    use_delta_kernels()
    GatedDeltaNet._apply_gated_norm = _gated_norm
    dsa.rotate_activation = lambda x: x
    random._get_share_storage = lambda: share_storage


def use_delta_kernels() -> None:
    """Put plain torch in the place of flash-linear-attention's kernels."""
    common.HAVE_FLA, common.l2norm = True, _l2norm
    gdn.causal_conv1d = _convolution
    gdn.chunk_gated_delta_rule = _gated_delta_rule


def _l2_normed(norm: L2Norm, hidden: torch.Tensor) -> torch.Tensor:
    """Megatron's, compiled."""

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        scale = (hidden.float().pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
        return (hidden * scale).to(hidden.dtype)

    return _Saving.apply(compute, hidden)


class _L2Norm(torch.autograd.Function):
    """flash-linear-attention's: it saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x.float().pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
        y = (x * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        y, scale = ctx.saved_tensors
        return ((gradient - (gradient * y).sum(-1, keepdim=True) * y) * scale).to(y.dtype)


_l2norm = _L2Norm.apply


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor | None = None, **unused: Any
) -> tuple[torch.Tensor, None]:
    """flash-linear-attention's, over tokens and by channels, followed by SiLU: it saves its input."""
    if cu_seqlens is not None:
        places = pairwise(cu_seqlens.tolist())
        return torch.cat([_convolution(x[:, begin:end], weight)[0] for begin, end in places], 1), None

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        width = weight.shape[-1]
        convolved = torch.nn.functional.conv1d(
            x.transpose(1, 2), weight[:, None], padding=width - 1, groups=len(weight)
        )
        return torch.nn.functional.silu(convolved[..., : x.shape[1]]).transpose(1, 2).contiguous()

    return _Saving.apply(compute, x, weight), None


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None, **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """flash-linear-attention's: it saves its operands and, for each token, 64 numbers a head.

    The documents of a pack have no state before them.
    """
    rule = common.torch_chunk_gated_delta_rule
    if cu_seqlens is not None:
        places = list(pairwise(cu_seqlens.tolist()))
        parts = [rule(*(x[:, a:b] for x in (query, key, value)), g[:, a:b], beta[:, a:b]) for a, b in places]
        return torch.cat([part for part, _ in parts], 1), None
    inside = value.new_zeros(*value.shape[:3], 64)
    operands = [query, key, value, g, beta, inside, *([] if initial_state is None else [initial_state])]

    def compute(*operands: torch.Tensor) -> Any:
        query, key, value, g, beta, _, *state = operands
        of_state = {"initial_state": state[0] if state else None, "output_final_state": output_final_state}
        result = rule(query, key, value, g, beta, **of_state)
        return result if output_final_state else result[0]

    result = _Saving.apply(compute, *operands)
    return result if output_final_state else (result, None)


def _gated_norm(layer: GatedDeltaNet, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Megatron's, compiled: the work after the norm is one kernel."""
    normed = layer.out_norm(x.reshape(-1, x.shape[-1]))

    def compute(normed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)

    return _Saving.apply(compute, normed, gate.reshape(-1, gate.shape[-1]))


def _output_gate(layer: Attention, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Megatron's, compiled."""

    def compute(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x * torch.sigmoid(gate.float())).to(x.dtype)

    return _Saving.apply(compute, x, gate.contiguous().view(*x.shape))
