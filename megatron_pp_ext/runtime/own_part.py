"""The part that a rank has of a tensor which its group has gathered, kept in place of the whole tensor.

Under sequence parallelism a weight gradient reads operands that were gathered from all tensor-parallel ranks.
Between I and W a rank keeps its part alone, and the group gathers the tensor again in W: what waits is a
``1 / group.size()`` of it.  Bytes are cut and gathered, and never computed again, so that W reads what I had.
"""

import torch
import torch.distributed as dist


class OwnPart:
    """The ``part`` that this rank has of a tensor of ``shape``, which a ``group`` divides along ``dim``.

    Of that dimension ``length`` entries are divided, all by default; those after them are padding, which
    comes back as zeros.
    """

    def __init__(
        self,
        part: torch.Tensor,
        group: dist.ProcessGroup,
        shape: torch.Size,
        dim: int = 0,
        length: int | None = None,
    ) -> None:
        self.part = part
        self._group, self._shape, self._dim = group, shape, dim
        self._length = shape[dim] if length is None else length
        self._under_way: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def cut(
        cls, whole: torch.Tensor, group: dist.ProcessGroup, dim: int = 0, length: int | None = None
    ) -> "OwnPart":
        """Return this rank's part of ``whole``, copied: a view would keep all of its memory."""
        length = whole.shape[dim] if length is None else length
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        part = whole.narrow(dim, rank * (length // ranks), length // ranks)
        return cls(part.clone(memory_format=torch.contiguous_format), group, whole.shape, dim, length)

    @property
    def parts(self) -> "tuple[OwnPart, ...]":
        """The part itself: an operand of several tensors has one for each."""
        return (self,)

    def start(self) -> None:
        """Launch the gather, unless it is under way."""
        if self._under_way is not None:
            return
        is_padded = self._length != self._shape[self._dim]
        whole = (torch.zeros if is_padded else torch.empty)(
            self._shape, dtype=self.part.dtype, device=self.part.device
        )
        # A gather fills whole rows; along another dimension the parts lie one after the other, to be moved.
        gathered = whole.narrow(0, 0, self._length) if self._dim == 0 else self._apart()
        work = dist.all_gather_into_tensor(
            gathered.view(-1, *self.part.shape[1:]), self.part, group=self._group, async_op=True
        )
        assert work is not None
        self._under_way = work, whole, gathered

    def _apart(self) -> torch.Tensor:
        return self.part.new_empty((dist.get_world_size(self._group), *self.part.shape))

    def take(self) -> torch.Tensor:
        """Return the whole tensor, once its gather is done; launch it now where nobody has."""
        self.start()
        assert self._under_way is not None
        work, whole, gathered = self._under_way
        self._under_way = None
        work.wait()
        if self._dim:
            divided = whole.narrow(self._dim, 0, self._length)
            divided.unflatten(self._dim, (len(gathered), -1)).copy_(gathered.movedim(0, self._dim))
        return whole
