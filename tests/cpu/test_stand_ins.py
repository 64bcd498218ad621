"""torch.cuda's stand-ins."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_pp_ext import cpu
from megatron_pp_ext.cpu import checkpoint_writers, megatron_stubs, torch_stubs
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)])
def test_tensors_are_made_and_stay_on_the_cpu(device: object) -> None:
    assert torch.zeros(2, device=device, pin_memory=True).device.type == "cpu"
    assert torch.tensor([1.0], device=device).device.type == "cpu"
    assert torch.ones(2).new_empty(3, device=device).device.type == "cpu"
    assert torch.ones(2).to(device).device.type == "cpu"
    assert torch.ones(2).to(device, torch.float64).dtype == torch.float64
    assert torch.ones(2).to(device=device, dtype=torch.int64).dtype == torch.int64
    assert torch.ones(2).cuda(0, non_blocking=True).device.type == "cpu"
    assert torch.nn.Linear(2, 2).to(device).cuda(0).weight.device.type == "cpu"
    assert torch.empty(2, device="meta").device.type == "meta"


def test_types_are_named_as_on_a_gpu() -> None:
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.half
    assert torch.ones(2).type(torch.int64).dtype == torch.int64


def test_the_gpu_generator_is_the_cpu_generator() -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_a_data_loader_draws_nothing_that_dropout_draws() -> None:
    before = torch.cuda.get_rng_state()
    for workers in (0, 1):
        assert len(list(DataLoader(range(4), num_workers=workers))) == 4
    assert torch.equal(torch.cuda.get_rng_state(), before)
    mine = torch.Generator()
    assert DataLoader(range(4), generator=mine).generator is mine


def test_what_is_sent_stays_until_it_has_left() -> None:
    """Megatron 0.17 frees an output as soon as it begins to send it."""

    def send_and_free(rank: int) -> float:
        dist.init_process_group("nccl")
        numbers = torch.ones(1 << 22)
        if rank == 0:
            sending = dist.isend(numbers, 1)
            numbers.data = torch.empty(1)
            others = torch.zeros(1 << 22)  # likely in the same place
            dist.barrier()
            sending.wait()
            return float(others[0])
        dist.barrier()  # by now the other rank has freed what it sends
        dist.recv(numbers.zero_(), 0)
        return float(numbers.min())

    assert run_ranks(send_and_free, 2) == [0.0, 1.0]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_ranks_exchange_parts_of_any_size(kind: Callable[[list[int]], object]) -> None:
    """Megatron counts in a tensor what each expert gets, which may be nothing."""

    def exchange(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        sends, receives = [[3, 1], [0, 2]][rank], [[3, 0], [1, 2]][rank]
        numbers = torch.empty(sum(receives))
        mine = 10.0 * rank + torch.arange(sum(sends))
        dist.all_to_all_single(numbers, mine, kind(receives), input_split_sizes=kind(sends))
        return numbers.tolist()

    assert run_ranks(exchange, 2) == [[0, 1, 2], [3, 10, 11]]


def test_ranks_gather_parts_of_any_size() -> None:
    """nccl does so, and by it the replicas that share Megatron's Muon exchange weights; one may have none.

    Megatron's asynchronous saves gather equal parts in the background, and pass every argument by its place.
    """

    def gather(rank: int) -> list[list[float]]:
        dist.init_process_group("nccl")
        parts, equal = [torch.empty(0), torch.empty(3)], [torch.empty(1), torch.empty(1)]
        dist.all_gather(parts, torch.full((3 * rank,), float(rank)), group=dist.group.WORLD)
        dist.all_gather(equal, torch.full((1,), float(rank)), dist.group.WORLD, True).wait()
        return [part.tolist() for part in (*parts, *equal)]

    assert run_ranks(gather, 2) == 2 * [[[], [1, 1, 1], [0], [1]]]


def test_installing_again_changes_nothing_and_after_megatron_is_refused() -> None:
    before = torch.zeros
    cpu.install()
    assert torch.zeros is before
    code = "import sys; sys.modules['megatron.core'] = sys; from megatron_pp_ext import cpu; cpu.install()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "call megatron_pp_ext.cpu.install() before importing Megatron" in run.stderr


def test_an_event_tells_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda's does: Megatron's timers divide by a thousand."""
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(torch_stubs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        end.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == 2500.0


def test_what_was_saved_on_a_gpu_is_loaded(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(3)}, tmp_path / "weights.pt")
    for device in ("cuda", "cuda:3", torch.device("cuda", 1), lambda storage, location: storage):
        loaded = torch.load(tmp_path / "weights.pt", map_location=device)
        assert loaded["weight"].tolist() == [0, 1, 2]


def test_a_checkpoint_in_the_background_has_its_own_copies() -> None:
    """Training goes on with tensors that it shares with the process that writes."""
    shared, own = torch.zeros(2).share_memory_(), torch.zeros(2)
    preload = checkpoint_writers.copy_shared(lambda buckets: buckets).__func__
    ((file, key, (others, tensors)),) = preload([("file", "key", (["other"], [("a", shared), ("b", own)]))])
    shared.add_(1)
    assert (file, key, others) == ("file", "key", ["other"])
    assert [(item, tensor.tolist()) for item, tensor in tensors] == [("a", [0.0, 0.0]), ("b", [0.0, 0.0])]


@pytest.mark.parametrize("is_parallel", [False, True])
def test_norms_are_marked_for_sequence_parallelism(is_parallel: bool) -> None:
    """Their gradients are summed over tensor-parallel ranks, and the layer is made as if it had none."""

    def make(cls: type, config: SimpleNamespace, size: int) -> torch.nn.Module:
        assert not config.sequence_parallel
        return torch.nn.LayerNorm(size)

    config = SimpleNamespace(sequence_parallel=is_parallel)
    norm = megatron_stubs.mark_for_sequence_parallelism(make)(torch.nn.LayerNorm, config, 4)
    marks = [getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()]
    assert marks == [is_parallel] * 2
    assert config.sequence_parallel is is_parallel
