"""Records which collectives a stage calls in a rehearsal, where no other rank takes part in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pp_ext.planner.collective import Collective
from megatron_pp_ext.runtime.executor import Recorder
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.placement import Placement

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "_reduce_scatter_base_": "gather",
    "reduce_scatter_": "gather",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}
"""The operations of ``Collective``, by torch's names for what passes its dispatcher."""


class CollectiveRecorder(TorchDispatchMode):
    """Records actions with ``recorder`` and, beside it, the collectives of the first microbatch.

    Collectives of data parallelism are left out: they reduce gradients once a step, beside other work.
    """

    def __init__(self, placement: Placement, recorder: Recorder) -> None:
        super().__init__()
        self.found: list[Collective] = []
        self._placement, self._recorder = placement, recorder
        self._action: Action | None = None

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """See ``executor.Recorder``."""
        with self._recorder.during(action):
            if action.microbatch:
                yield
                return
            self._action = action
            with self:
                yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record ``func`` if it is a collective, and call it."""
        name = func._schema.name
        if name.startswith("c10d::") and (operation := _OPERATIONS.get(name.removeprefix("c10d::"))):
            self._record(operation, args)
        return func(*args, **(kwargs or {}))

    def _record(self, operation: str, args: Any) -> None:
        assert self._action is not None
        group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
        members = dist.get_process_group_ranks(group)
        if len(members) < 2 or "DATA_PARALLEL" in group.group_desc:
            return
        chunk = self._placement.chunk_of(self._action.stage)
        size = max(_bytes(one) for one in args[:2])
        stride = members[1] - members[0]
        kind = str(self._action.kind)
        self.found.append(Collective(chunk, kind, operation, size, len(members), stride))


def _bytes(tensors: Any) -> int:
    """Return the bytes of one tensor or of nested lists of them; 0 for anything else."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0
