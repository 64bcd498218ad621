"""Megatron's fine-grained offloading (--fine-grained-activation-offloading) in the order of a program."""

import inspect
from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.activation_meter import ActivationMeter, watching
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.split import Owner
from megatron_pp_ext.schedule.actions import Action, Kind


class ProgramOffloadManager(PipelineOffloadManager):
    """The manager of the steps of one rank whose ``actions`` are always the same; None for evaluations.

    Where steps differ, each kind of them has a manager, since a manager knows the handlers and groups of its
    first step; ``like`` is one whose streams and pinned memory it shares.

    Megatron's manager has a handler for each chunk and microbatch of a step, makes them in the first one, and
    goes through them in a list for forwards and in one for backwards (fine_grained_activation_offload.py,
    0.17 to 0.19 and the main branch of August 2026).  The second list is made as forwards come, which is
    right for 1F1B and for the interleaved schedule alone.  In this one both follow the program: a forward
    takes the next handler, whose backward has the place that the program gives it.
    """

    _d2h_stream: torch.cuda.Stream
    _h2d_stream: torch.cuda.Stream
    _cpu_tensor_pool: Any
    _cur_forward_chunk: Any

    def __init__(self, actions: Sequence[Action] | None, like: "ProgramOffloadManager | None" = None) -> None:
        super().__init__()
        if like is not None:
            self._d2h_stream, self._h2d_stream = like._d2h_stream, like._h2d_stream
            self._cpu_tensor_pool = like._cpu_tensor_pool
        self.do_offload = actions is not None
        self._forwards: list[Owner] = []
        self._place_of_backward: dict[Owner, int] = {}
        for place, (stage, kind, microbatch) in enumerate(actions or ()):
            if kind is Kind.F:
                self._forwards.append(Owner(stage, microbatch))
            elif kind in (Kind.I, Kind.B):
                self._place_of_backward[Owner(stage, microbatch)] = place
        self._places: dict[Any, int] = {}

    def init_model_chunk_offload_handler(self, *args: Any, **kwargs: Any) -> None:
        """Take the handler of the forward that begins, which Megatron's models announce by this call."""
        if not self.do_offload:
            return
        owner = self._forwards[self._cached_chunks_index_forward]
        if self._is_warmup:
            super().init_model_chunk_offload_handler(*args, **kwargs)
            handler = self._cur_forward_chunk
            self._places[handler] = self._place_of_backward[owner]
            insort(self._cached_chunks_backward, handler, key=self._places.__getitem__)
        self._cur_forward_chunk = self._cached_chunks_forward[self._cached_chunks_index_forward]
        self._cached_chunks_index_forward += 1

    def push(self, handler: Any) -> None:
        """Do nothing in place of stock's, which lists a backward by the order of forwards."""

    def flush(self) -> None:
        """Do nothing; see ``push``."""

    def pop_forward_chunk(self, name: str | None = None) -> Any:
        """Return the handler of the running forward; None in an evaluation."""
        return self._cur_forward_chunk

    def front_backward_chunk(self, name: str | None = None) -> Any:
        """Return the handler whose backward comes next, which may begin to reload.

        In the first step it does not know whether a forward has ended, so one that is running does not count.
        """
        front = super().front_backward_chunk(name)
        return None if self._is_warmup and front is self._cur_forward_chunk else front

    def on_save_for_backward(self, tensor: torch.Tensor) -> Any:
        """Let the activation meter count tensors that the manager keeps on the device or does not take."""
        saved, meter = super().on_save_for_backward(tensor), watching()
        if isinstance(saved, torch.Tensor):
            return saved if meter is None else meter.pack(saved)
        group = self.cur_forward_chunk().offload_groups[saved[0] - 1]
        if not isinstance(group._tensors, _CountedTensors):
            group._tensors = _CountedTensors(group._tensors)
        group._tensors.count(saved, meter, self._forwards[self._cached_chunks_index_forward - 1])
        return saved

    def on_get_saved_tensor(self, saved_state: Any) -> torch.Tensor:
        """Return the tensor that ``on_save_for_backward`` took."""
        if isinstance(saved_state, torch.Tensor | tuple):
            tensor: torch.Tensor = super().on_get_saved_tensor(saved_state)
            return tensor
        return ActivationMeter.unpack(saved_state)


class _MeterToken:
    """Lives as long as the activation meter has to count a tensor."""

    __slots__ = ("__weakref__",)


class _CountedTensors(dict[Any, Any]):
    """The tensors of a group by tag, which the meter counts, or their places on the host."""

    def __init__(self, tensors: dict[Any, Any]) -> None:
        super().__init__(tensors)
        self._watched: dict[Any, tuple[ActivationMeter, Owner]] = {}
        self._counted: dict[Any, _MeterToken] = {}

    def count(self, tag: Any, meter: ActivationMeter | None, owner: Owner) -> None:
        """Let ``meter``, if any, count the tensor of ``tag`` for ``owner`` while it is on the device."""
        if meter is not None:
            self._watched[tag] = meter, owner
            self[tag] = self[tag]

    def __setitem__(self, tag: Any, state: Any) -> None:
        super().__setitem__(tag, state)
        self._counted.pop(tag, None)
        if isinstance(state, torch.Tensor) and tag in self._watched:
            meter, owner = self._watched[tag]
            self._counted[tag] = _MeterToken()
            meter.hold(owner, state, self._counted[tag])

    def pop(self, tag: Any) -> Any:  # type: ignore[override]
        self._counted.pop(tag, None)
        self._watched.pop(tag, None)
        return super().pop(tag)


_serving: ProgramOffloadManager | None = None


@hook(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager.get_instance",
    "",
    "--fine-grained-activation-offloading in the order of any schedule",
)
def serve(stock: Any) -> Any:
    """Return the manager of the step that runs."""
    return _serving or stock()


@contextmanager
def serving(manager: ProgramOffloadManager) -> Iterator[None]:
    """Let ``manager`` serve the step inside."""
    global _serving
    before, _serving = _serving, manager
    try:
        yield
    finally:
        _serving = before


class FineGrainedOffload:
    """Has a manager for each kind of step, and one without handlers for evaluations."""

    def __init__(self) -> None:
        self._managers: dict[Hashable, ProgramOffloadManager] = {}

    @contextmanager
    def step(self, kind: Hashable, plan: RankPlan, inputs: StepInputs) -> Iterator[None]:
        """Let Megatron's layers find the manager of the step inside.

        Steps of one ``kind`` have the same ``plan``.  The end of the first of them is collective over the
        job: Megatron prints what it moves.
        """
        if kind not in self._managers:
            first = next(iter(self._managers.values()), None)
            self._managers[kind] = ProgramOffloadManager(None if inputs.forward_only else plan.actions, first)
        manager = self._managers[kind]
        try:
            with serving(manager):
                yield
                if not inputs.forward_only:
                    manager.reset(**_groups(manager, inputs))
        except BaseException:
            del self._managers[kind]  # which is in the middle of its step
            raise


def _groups(manager: ProgramOffloadManager, inputs: StepInputs) -> dict[str, Any]:
    """Return the group by which newer releases sum up the bytes they move."""
    if "process_group" not in inspect.signature(manager.reset).parameters:
        return {}
    return {"process_group": ProcessGroupCollection.use_mpu_process_groups().tp_dp_cp}
