"""The collectives of vocabulary parallelism between the ranks of a pipeline."""

import torch
import torch.distributed as dist


class Exchanges:
    """Each method begins a collective, in one order on all ranks, and returns a handle to wait for.

    ``pipeline`` is a group of the pipeline's ranks, and ``home`` below a number among these.  ``everyone`` is
    a group of all ranks with rows of the vocabulary; under tensor parallelism these are more than the
    pipeline's.  Both groups carry nothing else.
    """

    def __init__(self, pipeline: dist.ProcessGroup, everyone: dist.ProcessGroup | None = None) -> None:
        self._pipeline, self._everyone = pipeline, everyone or pipeline

    def broadcast(self, tensor: torch.Tensor, home: int) -> dist.Work:
        """Give ``tensor`` of ``home`` to all ranks of the pipeline, which have one of its shape and type."""
        source = dist.get_global_rank(self._pipeline, home)
        return _begun(dist.broadcast(tensor, source, group=self._pipeline, async_op=True))

    def reduce(self, tensor: torch.Tensor, home: int) -> dist.Work:
        """Sum ``tensor`` over all ranks of the pipeline on ``home``; the other ranks' tensors are lost."""
        target = dist.get_global_rank(self._pipeline, home)
        return _begun(dist.reduce(tensor, target, group=self._pipeline, async_op=True))

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Return a buffer for the ``part`` of every rank, ranks x the shape of ``part``, and the handle."""
        whole = part.new_empty(self._everyone.size(), *part.shape)
        gathering = dist.all_gather_into_tensor(
            whole.flatten(0, 1), part, group=self._everyone, async_op=True
        )
        return whole, _begun(gathering)


def _begun(work: dist.Work | None) -> dist.Work:
    """Return the handle of a collective of a group that this rank is in."""
    assert work is not None
    return work
