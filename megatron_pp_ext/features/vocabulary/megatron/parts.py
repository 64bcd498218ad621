"""The modules that hold a rank's rows of the embedding and of the output layer, in a Megatron model.

On the two end stages they hand on the results of ``features.vocabulary.runtime``.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import MakeViewlessTensor

from megatron_pp_ext.integration.core.parameter_marks import Marks, marked

_ALIGNED = 64
"""Rows to which parts are rounded where that is possible, since products of other shapes are slower."""


class VocabularyPart(torch.nn.Module):
    """A rank's rows of the embedding or of the output weight, or a stand-in where it has none.

    Before a module's forward Megatron's data parallelism gathers the weights that an optimizer on another
    rank has updated.  That is why ``rows`` calls this module, without an argument.
    """

    weight: Any
    first = total = 0
    key = ""
    is_tied = False
    """Whether these are rows of the embedding that serve as the output weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def hold(self, whole: torch.Tensor, marks: Marks, key: str) -> None:
        """Take this rank's rows of ``whole``, the weight of its tensor-parallel rank.

        The rows carry the weight's ``marks``; ``key`` is its name in checkpoints.
        """
        pipeline, tensor = parallel_state.get_pipeline_model_parallel_group(), tensor_ranks()
        begin, end = (row_of(len(whole), pipeline.rank() + past, pipeline.size()) for past in (0, 1))
        self.key, self.total = key, tensor.size() * len(whole)
        self.first = tensor.rank() * len(whole) + begin
        self.weight = marked(whole[begin:end].clone(), marks)
        self.weight.rows_of_whole = self.first, self.total

    def rows(self) -> torch.Tensor:
        """Return the weight, up to date."""
        self()
        return self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Describe the rows as a part of the whole weight, as Megatron's checkpoints need it."""
        if self.weight is None:
            return {}
        replicas = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(
            with_context_parallel=True
        )
        rows, hidden = self.weight.shape
        return {
            f"{prefix}weight": ShardedTensor(
                key=self.key,
                data=self.weight,
                dtype=self.weight.dtype,
                local_shape=(rows, hidden),
                global_shape=(self.total, hidden),
                global_offset=(self.first, 0),
                axis_fragmentations=None,  # parts may differ by some rows
                replica_id=(0, 0, replicas.rank()),
                allow_shape_mismatch=True,  # the padding of a vocabulary goes by the number of ranks
            )
        }


class EmbeddingPart(VocabularyPart):
    """The stand-in for the embedding on the first stage, which returns the rows that all ranks looked up.

    ``given``, batch x tokens x hidden, is set before each forward.  Tensor parallelism adds up, or deals out,
    as in ``VocabParallelEmbedding``.
    """

    given: torch.Tensor | None = None
    scatters = False

    def forward(self, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the embedded ``tokens``, as the module does that this one replaces."""
        if tokens is None:
            return None
        embedded, self.given = self.given, None
        if embedded is None or embedded.shape[:2] != tokens.shape:
            raise RuntimeError("a shared embedding was asked for other tokens than those of its microbatch")
        if self.scatters:
            return reduce_scatter_to_sequence_parallel_region(
                embedded.transpose(0, 1).contiguous(), group=tensor_ranks()
            )
        return reduce_from_tensor_model_parallel_region(embedded, group=tensor_ranks())


class OutputPart(VocabularyPart):
    """Stands, on the last stage, for the output layer and its loss: hands on the hidden state.

    ``labels``, batch x tokens, are the last forward's.
    """

    labels: torch.Tensor | None = None
    sequence_parallel = False
    """Megatron's branch core_dev_r0.16.0 asks its output layer for it."""

    def forward(
        self, input_: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the hidden state, by Megatron's name for it, where logits were, and no bias.

        It is returned in another tensor with the same memory: a stage's output is emptied once it is sent,
        which must not touch what the layer before has kept of it.
        """
        if input_ is None:
            return None, None
        return MakeViewlessTensor.apply(input_, input_.requires_grad), None

    def keep_labels(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Stand for ``compute_language_model_loss``: the loss is computed when all ranks have their part."""
        self.labels = labels
        return hidden


def row_of(rows: int, rank: int, ranks: int) -> int:
    """Return the first of ``rows`` that ``rank`` has; ``rank == ranks`` gives their end."""
    aligned = math.gcd(rows, _ALIGNED)
    blocks = rows // aligned
    if blocks < 8 * ranks:
        aligned, blocks = 1, rows
    return aligned * (blocks * rank // ranks)


def tensor_ranks() -> dist.ProcessGroup:
    """Return the ranks of tensor parallelism, each of which has other rows."""
    return parallel_state.get_tensor_model_parallel_group()
