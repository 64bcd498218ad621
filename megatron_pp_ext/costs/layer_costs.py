"""What the layers of a transformer have in common: costs for one microbatch on one tensor-parallel rank.

Operations follow arXiv 2401.10241, table 3, generalised to grouped queries, gated MLPs and experts.  Bytes
are those that autograd saves and that deferred weight gradients hold on to, without the small ones (the
statistics of norms, masks, indices); ``tests/integration/test_model_costs.py`` compares them with those that
the activation meter counts.  Under FP8 the inputs of products, and the operands that wait for W, are counted
as one quantized copy, a byte for each number, and everything else as without FP8.
"""

from megatron_pp_ext.costs.kernels import KernelSeconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import ActivationSizes, ProductCosts
from megatron_pp_ext.job.typed_job import Job


class LayerCosts:
    """What layers of every kind are made of, in ``job``: sizes, products, norms.

    ``kernels`` tell their seconds.
    """

    def __init__(self, job: Job, kernels: KernelSeconds | None = None) -> None:
        self.job = job
        self.kernels = kernels or KernelSeconds()
        self.sizes = ActivationSizes(job)
        self.products = ProductCosts(job, self.sizes, self.kernels)
        self.recomputed = job.memory.recomputed

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

    def norm(self) -> Part:
        """Return a norm and the addition to the residual stream.

        The norm keeps its input, and the layer after it keeps the norm's output unless that is recomputed.
        """
        kept = 1 if "layernorm" in self.recomputed else 1 + self.sizes.waiting
        # The norm reads and writes, the addition reads two and writes one; their backwards likewise.
        seconds = self.kernels.copy(5 * self.hidden_bytes)
        parameters = self.sizes.hidden * (1 if self.job.model.normalization == "RMSNorm" else 2)
        return Part(
            forward_seconds=seconds,
            input_gradient_seconds=seconds,
            after_forward=kept * self.hidden_bytes,
            parameters=parameters,
        )

    def dropped(self) -> Part:
        """Return the mask of the dropout after embedding, attention or MLP, a byte for each number."""
        return Part(
            after_forward=self.hidden_bytes / self.sizes.bytes if self.job.model.hidden_dropout > 0 else 0.0
        )
