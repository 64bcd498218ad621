"""The memory that ``auto`` may use, as every rank of a job sees it."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_pp_ext.megatron.core import free_memory
from tests.support.ranks import run_ranks

GIB = 2.0**30


def by_rank(rank: int, free: list[float]) -> list[float]:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    free_memory.free_bytes = lambda: int(free[rank])
    return free_memory.free_bytes_by_rank()


def test_the_fullest_device_of_a_pipeline_rank_decides() -> None:
    """Two pipelines of two ranks, with a tenth left for what allocators and kernels take."""
    found = run_ranks(by_rank, 4, [5 * GIB, 2 * GIB, 70 * GIB, 3 * GIB])
    assert found == [pytest.approx([0.9 * 2 * GIB, 0.9 * 3 * GIB])] * 4


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(free_memory, "_pools", lambda: {"machine": int(12 * GIB)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert free_memory.free_bytes() == 3 * GIB
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert free_memory.free_bytes() == 2 * GIB, "all may be here"
    monkeypatch.delenv("WORLD_SIZE")
    assert free_memory.free_bytes() == 12 * GIB


def test_what_torch_has_reserved_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB the driver has 30 left; torch holds 40, of which tensors take 25."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name, value in (
        ("mem_get_info", (30 * GIB, 80 * GIB)),
        ("memory_reserved", 40 * GIB),
        ("memory_allocated", 25 * GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert free_memory.free_bytes() == 45 * GIB
