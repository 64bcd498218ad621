"""The formats of numbers, in the words of the flags: a part of a ``Job``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """The formats of numbers, and the kernels that compute with them."""

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
    bias_gelu_fusion: bool = True
    bias_swiglu_fusion: bool = True
    use_fused_weighted_squared_relu: bool = False
    use_transformer_engine_op_fuser: bool = False
    moe_paged_stash: bool = False
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
        """The format of the layers' products, as a system names it (``costs.system_fields.DTYPES``)."""
        if not self.is_half or not (self.fp8 or self.fp4):
            return "bf16" if self.is_half else "fp32"
        return "fp4" if self.fp4 else "fp8"

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
