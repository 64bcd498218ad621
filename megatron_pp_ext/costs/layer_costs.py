"""Parts that all kinds of layers share: costs for one microbatch on one tensor-parallel rank.

Operations follow arXiv 2401.10241, table 3, generalised to grouped queries, gated MLPs and experts.  Bytes
are the tensors that autograd saves and that deferred weight gradients hold, without the small ones (the
statistics of norms, masks, indices); ``tests/integration/test_model_costs.py`` compares them with the
activation meter's count.  Under FP8 the inputs of products, and the operands that wait for W, are counted
as one quantized copy, a byte for each number, and everything else as without FP8.
"""

from typing import Any

from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import ActivationSizes, ProductCosts
from megatron_pp_ext.job.typed_job import Job


class LayerCosts:
    """The building blocks of layers in ``job``: sizes, products, norms.

    ``kernels`` estimate their seconds.
    """

    def __init__(self, job: Job, kernels: KernelSeconds | None = None) -> None:
        self.job = job
        self.kernels = kernels or KernelSeconds()
        self.sizes = ActivationSizes(job)
        self.products = ProductCosts(job, self.sizes, self.kernels)
        self.recomputed = job.memory.recomputed

    @property
    def recomputes_norms(self) -> bool:
        """Whether the outputs of norms that are kernels of their own are computed again."""
        return "layernorm" in self.recomputed

    def of(self, **values: Any) -> "LayerCosts":
        """Return the same of a job with other ``values``."""
        other = LayerCosts(self.job.changed(**values), self.kernels)
        other.products.shapes = self.products.shapes
        return other

    @property
    def hidden_bytes(self) -> float:
        """The bytes of one activation of the hidden size, which only sequence parallelism divides."""
        return self.sizes.hidden_bytes

    def other(self) -> Part:
        """Return the small costs that every stage has, even without layers, such as residual additions."""
        operations = self.sizes.tokens * self.sizes.hidden
        seconds = self.kernels.addition(operations)
        return Part(
            weight_operations=operations,
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            weight_gradient_seconds=seconds,
        )

    def norm(self, is_recomputed: bool | None = None) -> Part:
        """Return a norm and the addition to the residual stream.

        The norm keeps its input, and the layer after it keeps the norm's output unless that is recomputed.
        By default "layernorm" decides, but nothing is recomputed where Transformer Engine computes the norm
        with the product after it.
        """
        if is_recomputed is None:
            is_recomputed = self.recomputes_norms and self.job.precision.transformer_impl == "local"
        saved_copies = 1 if is_recomputed else 1 + self.sizes.waiting
        # The norm reads and writes, the addition reads two and writes one; their backwards likewise.
        seconds = self.kernels.copy(5 * self.hidden_bytes)
        parameters = self.sizes.hidden * (1 if self.job.model.normalization == "RMSNorm" else 2)
        return Part(
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            after_forward=saved_copies * self.hidden_bytes,
            parameters=parameters,
        )

    def dropped(self) -> Part:
        """Return the dropout after embedding, attention or MLP, with a mask of a byte for each number.

        The addition after it writes the mask too.  Its backward reads gradient and mask, and writes.
        """
        if not self.job.model.hidden_dropout:
            return Part()
        mask = self.hidden_bytes / self.sizes.bytes
        return Part(
            forward_seconds=self.kernels.copy(mask),
            input_gradient_seconds=self.kernels.copy(mask + 2 * self.hidden_bytes),
            after_forward=mask,
        )
