"""Real training jobs on a CPU, and the launches of every rank, from its first collective to its last.

Megatron and the product run as users have them.  All messages and collectives of torch's process groups are
recorded and take place, with one exception: no message ever reports that it has left, so that a rank runs
as far ahead as it may.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from megatron_pp_ext import cpu
from megatron_pp_ext.features.pairs.runtime import Pair
from megatron_pp_ext.megatron.runners import flushed
from megatron_pp_ext.pipedream import flush_free
from megatron_pp_ext.runtime.operations import Recorded
from megatron_pp_ext.runtime.rank import Rank
from tests.support import training
from tests.support.launches.entries import Collective, Entry, HostWait, Kernel, Launches, Transfer, Wait
from tests.support.ranks import run_ranks

BETWEEN = "between steps"
"""The place of launches that belong to no action: those of set-up, finalization, optimizer and logs."""

_SAME_ON_ALL_RANKS: dict[str, int | None] = {
    "_allgather_base": 0,
    "_reduce_scatter_base": 1,
    "all_gather_single": 0,
    "all_gather_single_coalesced": 0,
    "all_to_all_single": None,
    "allgather": 0,
    "allgather_coalesced": 0,
    "allgather_into_tensor_coalesced": 0,
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "alltoall": None,
    "alltoall_base": None,
    "barrier": None,
    "broadcast": 0,
    "gather": 1,
    "gather_into_tensor": 1,
    "gather_single": 1,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "scatter": 0,
}
"""The collectives of a process group by their names in older and newer torch, each with the number of the
argument that has the same shapes on all ranks, or None."""

_STOP_HOST = (
    "all_gather_object",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
"""Functions of torch.distributed in which the host stops; over NCCL the others return after the launch."""


def record_job(world_size: int, flags: Sequence[str]) -> tuple[Launches, ...]:
    """Return the launches of all ranks of the world when the tiny GPT of ``training`` trains with ``flags``.

    The name of a launch has the action in which, or behind which, it stands, and the function, with its
    shapes where all ranks have the same.  The host stops where torch.distributed returns a result to it.
    Other reads from the device are not recorded, since ``synchronizations`` lets the host stop anywhere.
    """
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *flags])
    return tuple(run_ranks(_train, world_size, argv))


def _train(rank: int, argv: list[str]) -> Launches:
    recording = _Recording()
    with _recorded(recording):
        training._train(rank, argv, training.initialize_by_layer, None)
    _require_all(recording.entries)
    return tuple(recording.entries)


def _require_all(entries: Sequence[Entry]) -> None:
    """Raise RuntimeError if torch launched more in a group than is recorded, by a method left out above."""
    recorded: Counter[str] = Counter()
    for entry in entries:
        if isinstance(entry, Collective | Transfer):
            # Gloo counts some coalesced collectives once for each tensor.
            recorded[entry.group] += 1 + ("coalesced" in entry.name) * entry.name.count(",")
    for group in dist.distributed_c10d._world.pg_map:
        launched = group._get_sequence_number_for_group()
        if launched > recorded[_name(group)]:
            raise RuntimeError(
                f"{_name(group)} launched {launched} times, of which {recorded[_name(group)]} are recorded; "
                "wrap the method of torch's process groups that is missing"
            )


class _Recording:
    """The launches of one rank so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._action = BETWEEN
        self._works: dict[int, tuple[dist.Work, int]] = {}

    def go_to(self, action: str) -> None:
        """Let the launches that follow belong to ``action``."""
        self._action = action
        self.entries.append(Kernel(action))

    def launch(self, work: dist.Work | None, entry: Callable[[str], Entry]) -> None:
        """Record a launch, made by ``entry`` from the action; ``work`` stands for it in later waits."""
        # Works are kept, since another one could have the id of one that is gone.
        if work is not None:
            self._works[id(work)] = work, len(self.entries)
        self.entries.append(entry(self._action))

    def wait(self, work: dist.Work) -> None:
        """Let the compute stream wait for ``work``, and then continue with the action."""
        self.entries += Wait(self._works[id(work)][1]), Kernel(self._action)

    def stop_host(self) -> None:
        """Let the host wait for everything."""
        self.entries.append(HostWait())


@contextmanager
def _recorded(recording: _Recording) -> Iterator[None]:
    with ExitStack() as stack:

        def replace(owner: Any, name: str, wrap: Callable[..., Any], *args: Any) -> None:
            if hasattr(owner, name):
                original = getattr(owner, name)
                wrapped = wraps(original)(wrap(recording, original, *args))
                stack.enter_context(patch.object(owner, name, wrapped))

        for name, argument in _SAME_ON_ALL_RANKS.items():
            replace(dist.ProcessGroup, name, _collective, argument)
        replace(dist.ProcessGroup, "send", _message, True)
        replace(dist.ProcessGroup, "recv", _message, False)
        replace(dist.Work, "wait", _wait)
        replace(dist.Work, "is_completed", _never)
        for module in (dist, dist.distributed_c10d):
            for name in _STOP_HOST:
                replace(module, name, _synchronous)
            replace(module, "new_group", _rendezvous)
        replace(token_dispatcher, "maybe_move_tensor_to_cpu", _read_on_host)
        replace(Recorded, "run", _run_action)
        replace(Pair, "run", _run_pair)
        for runner in (flushed, flush_free):
            replace(runner, "execute", _execute)
        yield


def _collective(recording: _Recording, original: Callable, argument: int | None) -> Callable:
    def launch(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        shapes = "" if argument is None else f" {_shapes(args[argument])}"
        ranks = tuple(dist.get_process_group_ranks(group))
        work = original(group, *args, **options)
        recording.launch(
            work, lambda action: Collective(_name(group), ranks, f"{action}: {original.__name__}{shapes}")
        )
        return work

    return launch


def _shapes(tensors: Any) -> str:
    if isinstance(tensors, torch.Tensor):
        return "x".join(map(str, tensors.shape)) or "scalar"
    return ",".join(map(_shapes, tensors))


def _message(recording: _Recording, original: Callable, is_send: bool) -> Callable:
    def launch(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        global_peer = dist.get_global_rank(group, peer)
        work = original(group, tensors, peer, tag)
        recording.launch(
            work, lambda action: Transfer(_name(group), global_peer, is_send, f"{action}: {_shapes(tensors)}")
        )
        return work

    return launch


def _name(group: dist.ProcessGroup) -> str:
    return f"{group.group_desc} {group.group_name}"


def _wait(recording: _Recording, original: Callable) -> Callable:
    def wait(work: dist.Work, *timeout: Any) -> Any:
        recording.wait(work)
        return original(work, *timeout)

    return wait


def _never(recording: _Recording, original: Callable) -> Callable:
    return lambda work: False


def _synchronous(recording: _Recording, original: Callable) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        recording.stop_host()
        return result

    return call


def _rendezvous(recording: _Recording, original: Callable) -> Callable:
    """Record that all ranks of the world make each group together, members or not."""

    def call(*args: Any, **options: Any) -> Any:
        world = tuple(range(dist.get_world_size()))
        recording.launch(None, lambda action: Collective("hosts", world, f"{action}: new group"))
        recording.stop_host()
        return original(*args, **options)

    return call


def _read_on_host(recording: _Recording, original: Callable) -> Callable:
    """Record that a GPU's host waits for the counts of tokens, which Megatron leaves in tensors on a CPU."""

    def read(numbers: Any, as_numpy: bool = False, **options: Any) -> Any:
        recording.stop_host()
        return numbers.numpy() if as_numpy and torch.is_tensor(numbers) else numbers

    return read


def _run_action(recording: _Recording, original: Callable) -> Callable:
    def run(operation: Recorded, rank: Rank) -> None:
        recording.go_to(str(operation.action))
        original(operation, rank)

    return run


def _run_pair(recording: _Recording, original: Callable) -> Callable:
    """Let the launches of both halves of a pair belong to it; its messages stand after it."""

    def run(pair: Pair, rank: Rank) -> None:
        recording.go_to(f"{pair.forward.action}+{pair.backward.action}")
        original(pair, rank)

    return run


def _execute(recording: _Recording, original: Callable) -> Callable:
    def execute(*args: Any, **options: Any) -> None:
        original(*args, **options)
        recording.go_to(BETWEEN)

    return execute
