"""The groups for messages, made beside every default group that torch has had since 2.8.

NCCL needs GPUs, so what a release registers, its classes and its devices are stood in for, and gloo makes
the groups on ranks of their own: what is asked of torch is seen, and that no rank waits for another.
"""

import inspect
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_pp_ext.runtime.groups import GroupOptions, direction_groups, message_backend
from tests.support.ranks import run_ranks

PIPELINES = [0, 2], [1, 3]
PATIENCE = timedelta(seconds=60)
BOUND, CURRENT = torch.device("cuda", 1), torch.device("cuda", 0)


class Case(NamedTuple):
    """A release of torch, its default group, and what has to come of them."""

    release: str
    config: str
    bound: bool
    name: str
    streams_per_peer: bool = True
    members_only: bool = False
    use_nccl2: str = "1"

    def __str__(self) -> str:
        return f"{self.release} {self.config} {'bound' if self.bound else 'unbound'}"


CASES = [
    Case("2.15", "cuda:nccl", True, "nccl-lazy", members_only=True),
    Case("2.15", "cuda:nccl2", True, "nccl-lazy", members_only=True),
    Case("2.15", "cuda:nccl-lazy", True, "nccl-lazy", members_only=True),
    Case("2.15", "cpu:gloo,cuda:nccl", True, "nccl-lazy", members_only=True),
    Case("2.15", "cuda:nccl-legacy", False, "nccl-legacy"),
    Case("2.15", "cuda:nccl-legacy", True, "nccl-lazy", members_only=True),
    Case("2.15", "cuda:nccl", False, "nccl", use_nccl2="0"),
    Case("2.15", "cpu:gloo", False, "gloo"),
    Case("2.8", "cuda:nccl", False, "nccl"),
    Case("2.8", "cuda:nccl", True, "nccl", streams_per_peer=False),
    Case("2.8", "cpu:gloo,cuda:nccl", False, "nccl"),
    Case("2.8", "cpu:gloo,cuda:nccl", True, "nccl", streams_per_peer=False),
    Case("2.8", "cpu:gloo,cuda:gloo", False, "gloo"),
]
CLASSES = {"nccl2": "ProcessGroupNCCL2", "nccl-lazy": "ProcessGroupNCCLLazy"}


class Options(SimpleNamespace):
    """NCCL's, as torch 2.8 has them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        config = SimpleNamespace(max_ctas=None, min_ctas=None, cga_cluster_size=None, net_name=None)
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=config, _timeout=None)


class LazyOptions(Options):
    """As torch 2.15 has them."""

    lazy_init = False


def release(patch: pytest.MonkeyPatch, case: Case) -> None:
    """Stand in for what a release of torch registers, and for NCCL's options there."""
    has_nccl2 = case.release == "2.15"
    for name in CLASSES.values():
        if has_nccl2:
            patch.setattr(dist.distributed_c10d, name, object, raising=False)
        else:
            patch.delattr(dist.distributed_c10d, name, raising=False)
    registered = {"gloo", "nccl", *(("nccl-legacy", *CLASSES) if has_nccl2 else ())}
    patch.setattr(dist, "is_backend_available", registered.__contains__)
    patch.setenv("TORCH_DIST_USE_NCCL2", case.use_nccl2)
    options = LazyOptions if has_nccl2 else Options
    patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "current_device", lambda: CURRENT.index)


@contextmanager
def torch_as(case: Case, asked: list[dict], greeted: list[torch.device]):
    """A world of gloo that looks as ``case`` tells; what is asked of new_group goes to ``asked``."""
    zeros, new_group, world = torch.zeros, dist.new_group, dist.group.WORLD
    bound = BOUND if case.bound else None
    with pytest.MonkeyPatch.context() as patch:
        release(patch, case)

        def watched(ranks, backend, pg_options, **rest):
            asked.append({"ranks": ranks, "backend": backend, "options": pg_options, **rest})
            with pytest.MonkeyPatch.context() as truth:
                truth.setattr(type(world), "bound_device_id", None)
                return new_group(ranks, backend="gloo", **rest)

        def on_the_cpu(*size, device, **rest):
            if rest:  # torch's own
                return zeros(*size, device=device, **rest)
            greeted.append(device)
            return zeros(*size)

        patch.setattr(dist, "new_group", watched)
        patch.setattr(dist, "get_backend_config", lambda group: case.config)
        patch.setattr(type(world), "bound_device_id", bound)
        patch.setattr(torch, "zeros", on_the_cpu)
        yield


def two_sets(rank: int, cases: list[Case]) -> list[tuple[list[dict], list[torch.device], list[str]]]:
    """What a rank asks for and where it greets, when the groups are made twice, and what they are called."""
    dist.init_process_group("gloo")
    mine = PIPELINES[rank % 2]
    # As Megatron's embedding groups do: some ranks of a pipeline are in a group that others are not in.
    dist.new_group([0, 1])
    found = []
    for case in cases:
        asked: list[dict] = []
        greeted: list[torch.device] = []
        with torch_as(case, asked, greeted):
            groups = [*direction_groups(mine, PATIENCE), *direction_groups(mine, PATIENCE)]
        for group in groups:  # carries messages still
            value = torch.full((1,), float(rank))
            dist.all_reduce(value, group=group)
            assert value == sum(mine)
        found.append((asked, greeted, [group.group_name for group in groups]))
    return found


def test_groups_are_made() -> None:
    """Before torch 2.15 ranks do not agree on the name of a group that its members alone make."""
    is_newest = Version(torch.__version__) >= Version("2.15")
    cases = [case for case in CASES if is_newest or not case.members_only]
    by_rank = run_ranks(two_sets, 4, cases)
    for (rank, of_rank), (at, case) in product(enumerate(by_rank), enumerate(cases)):
        (asked, greeted, names), mine = of_rank[at], PIPELINES[rank % 2]
        made = [mine] if case.members_only else PIPELINES
        # All ranks of a group ask for it, in one order.
        assert [(one["ranks"], one["group_desc"]) for one in asked] == [
            (pipeline, f"PIPELINE_{direction}") for pipeline in made for direction in ("DOWN", "UP")
        ] * 2, case
        for one in asked:
            assert one["backend"] == case.name
            assert one["use_local_synchronization"] is case.members_only
            assert one["timeout"] == PATIENCE
            if case.name == "gloo":
                assert one["options"] is None
                continue
            assert one["options"].is_high_priority_stream
            assert one["options"].config.max_ctas == 4
            assert one["options"].config.min_ctas is None
            assert one["options"]._timeout == PATIENCE
            assert getattr(one["options"], "lazy_init", None) is (True if case.release == "2.15" else None)
        gpu = BOUND if case.bound else CURRENT
        assert greeted == [torch.device("cpu") if case.name == "gloo" else gpu] * 2
        assert names == by_rank[mine[0]][at][2]
        assert len(set(names)) == 4


@pytest.mark.parametrize("case", CASES, ids=Case.__str__)
def test_what_will_be_asked_for_is_known_before(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, case)
    backend = message_backend(case.config, case.bound)
    assert (backend.name, backend.streams_per_peer) == (case.name, case.streams_per_peer)


def own_options(rank: int, case: Case) -> list[object]:
    dist.init_process_group("gloo")
    asked: list[dict] = []
    wishes = GroupOptions(is_high_priority_stream=False, max_ctas=None, min_ctas=2, net_name="IB")
    with torch_as(case, asked, []):
        direction_groups([0], options=wishes)
    return [one["options"] for one in asked]


def test_options_are_the_callers() -> None:
    ((down, up),) = run_ranks(own_options, 1, CASES[0])
    assert down is not up  # torch writes the group's name into it
    assert not down.is_high_priority_stream
    assert vars(down.config) == {"max_ctas": None, "min_ctas": 2, "cga_cluster_size": None, "net_name": "IB"}


def through_torch(rank: int, default: str) -> tuple[list[bool], str]:
    """Make groups with this torch's own code, its NCCL backends replaced by gloo ones that bind a device.

    Returns whether each was split from the default group.
    """
    backends, split = dist.Backend, []

    def create(wanted, options):
        if wanted.process_group.bound_device_id is None:
            wanted.process_group.bound_device_id = torch.device("cuda", 0)
        split.append(wanted.split_from is not None)
        return dist.ProcessGroupGloo(
            wanted.store, wanted.group_rank, wanted.group_size, timeout=wanted.timeout
        )

    with pytest.MonkeyPatch.context() as patch:
        for name in ("nccl", *CLASSES):
            backends._ensure_backend_registered(name)
            patch.setitem(backends._plugins, name.upper(), backends._BackendPlugin(create, True))
            patch.setitem(backends.backend_capability, name, ["cpu", "cuda"])
        zeros = torch.zeros
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
        patch.setattr(dist, "new_group", inspect.unwrap(dist.new_group))  # without the stand-ins of --cpu
        inspect.unwrap(dist.init_process_group)(default)
        assert dist.group.WORLD.bound_device_id is not None
        for _ in range(2):
            down, _ = direction_groups(PIPELINES[rank % 2], PATIENCE)
        dist.group.WORLD.bound_device_id = None  # a barrier follows
    return split, dist.get_backend(down)


@pytest.mark.skipif(not dist.is_backend_available("nccl-lazy"), reason="this torch has no nccl-lazy")
@pytest.mark.parametrize("default", ["nccl", "nccl2", "nccl-lazy"])
def test_none_is_split_from_the_default_group(default: str) -> None:
    """To split is collective over all ranks, and ranks of other pipelines do not take part."""
    assert run_ranks(through_torch, 4, default) == [([False] * 5, "nccl-lazy")] * 4


REFUSED = {
    "xpu:xccl": "started with 'xpu:xccl', and pipeline messages need .*; start it with nccl or gloo",
    "cpu:mpi": "started with 'cpu:mpi', and pipeline messages need",
}


@pytest.mark.parametrize("config", REFUSED)
def test_no_backend_for_messages(config: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[config]):
        message_backend(config)


def test_no_world() -> None:
    with pytest.raises(RuntimeError, match=r"no default process group.*; call .*init_process_group first"):
        direction_groups([0])


def not_mine(rank: int) -> str:
    dist.init_process_group("gloo")
    with pytest.raises(ValueError) as error:
        direction_groups([1])
    return str(error.value)


def test_rank_of_no_pipeline() -> None:
    (said,) = run_ranks(not_mine, 1)
    assert said.startswith("rank 0 is not among the ranks [1]")


def no_gpu(rank: int, case: Case) -> str:
    dist.init_process_group("gloo")
    with torch_as(case, [], []), pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as error:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        direction_groups([0])
    return str(error.value)


def test_nccl_without_a_gpu() -> None:
    (said,) = run_ranks(no_gpu, 1, CASES[0])
    assert "needs a GPU on every rank, and this one sees none; look at CUDA_VISIBLE_DEVICES" in said


def meetings(rank: int, ranks: int, edges: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """(sender, receiver, group) of what this rank exchanged, in its order."""
    dist.init_process_group("gloo")
    seen = []
    send, receive = dist.send, dist.recv

    def watched_send(tensor, to, group):
        seen.append((rank, to, group.group_desc))
        send(tensor, to, group=group)

    def watched_receive(tensor, source, group):
        seen.append((source, rank, group.group_desc))
        receive(tensor, source, group=group)

    dist.send, dist.recv = watched_send, watched_receive
    direction_groups(list(range(ranks)), edges=edges)
    return seen


@pytest.mark.parametrize(
    ("ranks", "edges"), [(1, []), (2, []), (3, []), (4, []), (5, [(3, 0), (1, 3), (0, 3), (2, 1), (4, 4)])]
)
def test_all_who_exchange_messages_meet(ranks: int, edges: list[tuple[int, int]]) -> None:
    """Neighbours do, the pipeline's ends, and the pairs that the caller names."""
    by_rank = run_ranks(meetings, ranks, ranks, edges)
    pairs = {(rank, (rank + 1) % ranks) for rank in range(ranks)}.union(edges)
    expected = {
        (sender, receiver, "PIPELINE_DOWN" if sender < receiver else "PIPELINE_UP")
        for pair in pairs
        for sender, receiver in (pair, pair[::-1])
        if sender != receiver
    }
    assert {one for seen in by_rank for one in seen} == expected
    for rank, seen in enumerate(by_rank):
        assert len(seen) == len(set(seen)) == sum(rank in one[:2] for one in expected)
        # One group after the other: a communicator of all its ranks needs the first message of each of them.
        assert [group for *_, group in seen] == sorted(group for *_, group in seen)
    # One order that all ranks keep: whoever comes first in it is never waited for by the one before.
    done: set[tuple[int, int, str]] = set()
    while len(done) < len(expected):
        heads = [next((one for one in seen if one not in done), None) for seen in by_rank]
        ready = {one for one in heads if one and heads.count(one) == 2}
        assert ready, f"ranks wait for each other in a circle: {heads}"
        done |= ready


def wait_for_nothing(rank: int) -> str:
    """Rank 1 waits for a message that rank 0 does not send.

    The ranks meet before the groups are made, whose own meeting has to be over within the timeout, too.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    down, _ = direction_groups([0, 1], timeout=timedelta(seconds=5))
    if rank == 0:
        return ""
    with pytest.raises(RuntimeError) as error:
        down.recv([torch.empty(1)], 0, 0).wait()
    return str(error.value)


def test_a_message_that_never_comes_times_out() -> None:
    _, said = run_ranks(wait_for_nothing, 2)
    assert "Timed out" in said
