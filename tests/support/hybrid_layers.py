"""HybridModel's layers without Transformer Engine, for ``--spec tests.support.hybrid_layers stack``.

Megatron's own hybrid specs are made of Transformer Engine's modules.  These are attention (``*``), MLP
(``-``), experts (``E``), Mamba-2 and gated delta nets with their kernels stood in for (``M``, ``G``), and
multi-token prediction.  In
``grouped_stack`` a layer's experts are in one product, as --moe-grouped-gemm has them.
"""

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules as Parts

from tests.support import attention_layers, mamba_kernels  # noqa: F401
from tests.support.expert_layers import experts

attention_layers.use_delta_kernels()
hybrid_block.TENorm = WrappedTorchNorm  # the stack's last norm is not the spec's to choose

_dense = get_gpt_layer_local_spec().submodules

stack = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        gdn_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=Parts(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=GatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=ColumnParallelLinear,
                        out_norm=WrappedTorchNorm,
                        out_proj=RowParallelLinear,
                    ),
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=Parts(
                input_layernorm=WrappedTorchNorm,
                self_attention=_dense.self_attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=Parts(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=_dense.mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=Parts(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=experts(is_grouped=False),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=MultiTokenPredictionLayer,
                        submodules=MultiTokenPredictionLayerSubmodules(
                            enorm=WrappedTorchNorm,
                            hnorm=WrappedTorchNorm,
                            eh_proj=ColumnParallelLinear,
                            layer_norm=WrappedTorchNorm,
                        ),
                    )
                ]
            ),
        ),
    ),
)

_grouped = replace(stack.submodules.moe_layer.submodules, mlp=experts(is_grouped=True))

grouped_stack = ModuleSpec(
    module=HybridStack,
    submodules=replace(
        stack.submodules, moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_grouped)
    ),
)
