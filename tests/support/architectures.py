"""Small forms of today's models as Megatron's flags, to be trained by local layers on CPU ranks.

Megatron makes some of their layers of Transformer Engine's modules and of CUDA kernels alone; what stands in
for them is in ``attention_layers``, ``expert_layers`` and ``mamba_kernels``.
"""

from typing import Any

from tests.support import attention_layers  # the stand-ins for torch.cuda, before Megatron

# isort: split
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec

_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
_SPEC = "--spec tests.support.architectures layers"
_GROUPED = "--group-query-attention --num-query-groups 2 --kv-channels 16"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
_BALANCED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.0001"
)
_DEEPSEEK = (
    f"{_LLAMA} {_SPEC} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 "
    f"--mscale 1.0 --mscale-all-dim 1.0 {_EXPERTS} {_BALANCED} --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax "
    "--moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]*2+[1]*6)"
)
_HYBRID = (
    "--position-embedding-type none --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--disable-bias-linear --squared-relu --group-query-attention --num-query-groups 2 --mamba-num-heads 4 "
    "--mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2 --spec tests.support.hybrid_layers stack"
)
FLAGS = {
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3.2": f"{_DEEPSEEK} --experimental-attention-variant dsa --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.01",
    "qwen3-next": f"{_LLAMA} {_SPEC} {_GROUPED} {_EXPERTS} --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --attention-output-gate --apply-layernorm-1p "
    "--rotary-percent 0.5 --qk-layernorm --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001",
    # Megatron's local experts cannot have biases, which they add in place to what autograd needs.
    "gpt-oss": "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    f"{_GROUPED} {_EXPERTS} --softmax-type learnable --window-size 8,0 --window-attn-skip-freq 2 "
    "--activation-func-clamp-value 7.0 "
    "--glu-linear-offset 1.0 --quick-geglu --position-embedding-type yarn --rotary-scaling-factor 4.0 "
    "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 32 --yarn-beta-slow 1 --mscale 1.0 "
    "--mscale-all-dim 1.0",
    "nemotron-h": _HYBRID,
    "nemotron-3": f"{_HYBRID} {_EXPERTS} {_BALANCED} --moe-latent-size 16 "
    "--moe-shared-expert-intermediate-size 48",
}
_PATTERNS = {"nemotron-h": ("M-", "M-", "M*", "M-"), "nemotron-3": ("ME", "ME", "M*", "ME")}
"""The layers of hybrid models, in quarters."""


def flags(model: str, stages: int) -> list[str]:
    """Return the flags of ``model``; a hybrid one's layers are cut into so many ``stages``, 2 or 4."""
    quarters = _PATTERNS.get(model, ())
    per_stage = 4 // stages
    cut = ["".join(quarters[start : start + per_stage]) for start in range(0, len(quarters), per_stage)]
    pattern = ["--hybrid-layer-pattern", "|".join(cut)] if quarters else []
    return [*FLAGS[model].split(), *pattern]


class Normed(ColumnParallelLinear):
    """A norm and a product, in the place of Transformer Engine's layer of both."""

    def __init__(self, read: int, result: int, *, config: Any, **more: Any) -> None:
        super().__init__(read, result, config=config, **more)
        self.norm = attention_layers.Norm(config, read)

    def forward(self, hidden: Any, *more: Any, **keywords: Any) -> Any:
        """The product of the norm of ``hidden``."""
        return super().forward(self.norm(hidden), *more, **keywords)


class Backend(attention_layers.Backend):
    """Megatron's local modules for models with attention of a kind of its own."""

    def column_parallel_layer_norm_linear(self) -> type:
        """The product with its norm before it."""
        return Normed


def _attention(config: Any, backend: Any) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    attention: ModuleSpec = layer.submodules.self_attention
    attention.metainfo["fuse_input_layernorm"] = False
    return attention


def layers(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's own choice of layers, once the stand-ins are in place: what --spec names."""
    attention_layers.use_stand_ins()
    variants._get_backend_spec_provider = lambda config: Backend()
    variants._get_self_attention_module_spec = _attention
    return default_layer_spec(config, vp_stage)
