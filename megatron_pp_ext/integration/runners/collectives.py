"""Records which collectives a stage calls in a rehearsal, where no other rank takes part in them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.runtime.rank import Recorder
from megatron_pp_ext.runtime.storages import plain_tensors
from megatron_pp_ext.schedule.actions import Action
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.spans import Label

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "gather",
    "_allgather_base": "gather",
    "all_gather_single": "gather",
    "reduce_scatter": "gather",
    "_reduce_scatter_base": "gather",
    "reduce_scatter_single": "gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""The operations of ``Collective``, by the methods of a group that torch calls; torch 2.15 renamed three."""


class CollectiveRecorder:
    """Records actions with ``recorder`` and the collectives of the first microbatch.

    Collectives of data parallelism are left out: they reduce gradients once a step, while other work runs.

    The methods of torch's groups are replaced meanwhile.  A ``TorchDispatchMode`` would change what it
    watches: functions under ``torch.compile`` that are first called within one run uncompiled, up to torch
    2.13 for ever after.
    """

    def __init__(self, placement: Placement, recorder: Recorder) -> None:
        self.found: list[Collective] = []
        self._placement, self._recorder = placement, recorder

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        with self._recorder.during(action), nullcontext() if action.microbatch else self._watching(action):
            yield

    def span(self, label: Label) -> AbstractContextManager[None]:
        return self._recorder.span(label)

    @contextmanager
    def _watching(self, action: Action) -> Iterator[None]:
        # As the class keeps them: what getattr returns would not bind to a group when it is put back.
        methods = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _OPERATIONS}
        try:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, self._recording(action, _OPERATIONS[name], method))
            yield
        finally:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, method)

    def _recording(self, action: Action, operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(group: dist.ProcessGroup, *args: Any) -> Any:
            self._record(action, operation, group, args)
            return method(group, *args)

        return recorded

    def _record(self, action: Action, operation: str, group: dist.ProcessGroup, args: Any) -> None:
        members = dist.get_process_group_ranks(group)
        if len(members) < 2 or "DATA_PARALLEL" in group.group_desc:
            return
        chunk = self._placement.chunk_of(action.stage)
        size = max(sum(tensor.nbytes for tensor in plain_tensors(argument)) for argument in args[:2])
        stride = members[1] - members[0]
        self.found.append(Collective(chunk, str(action.kind), operation, size, len(members), stride))
