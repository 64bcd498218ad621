"""What a rank may take of the host: cgroups, and ranks that share it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import tests.support.ranks  # noqa: F401  (installs the stand-ins for torch.cuda before Megatron is imported)

# isort: split
from megatron_pp_ext.megatron.core import free_memory
from tests.support.ranks import run_ranks

GIB = 2**30
V2, V1 = free_memory._FILES


def cgroup(folder: Path, files: tuple[str, str, str], limit: str, used: int, reclaimed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {reclaimed}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB free, whose cgroups are in a folder."""
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=64 * GIB))
    for name, value in (("psutil", memory), ("CGROUPS", tmp_path / "fs"), ("OWN", tmp_path / "own")):
        monkeypatch.setattr(free_memory, name, value)
    (tmp_path / "fs").mkdir()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return tmp_path


@pytest.mark.parametrize(
    ("own", "files", "folder", "limit", "expected"),
    [
        ("0::/job/step/task", V2, "job", str(10 * GIB), 4 * GIB),
        ("0::/job/step/task", V2, "job/step/task", str(10 * GIB), 4 * GIB),
        ("0::/", V2, "", str(10 * GIB), 4 * GIB),
        ("0::/../outside", V2, "", str(10 * GIB), 4 * GIB),
        ("3:cpu,cpuacct:/\n7:memory:/docker/abc", V1, "memory/docker/abc", str(10 * GIB), 4 * GIB),
        ("7:memory:/docker/abc", V1, "memory", str(10 * GIB), 4 * GIB),
        ("3:cpu:/job", V1, "memory/job", str(10 * GIB), 32 * GIB),
        ("0::/job", V2, "job", "max", 32 * GIB),
        ("0::/job", V2, "job", str(2 * GIB), 0),
        ("0::/job", V2, "other", str(10 * GIB), 32 * GIB),
    ],
)
def test_a_cgroup_may_allow_less_than_the_machine_has(own, files, folder, limit, expected, machine):
    """Of 10 GiB it uses 3, one of which the kernel gives up first; two ranks share the rest."""
    (machine / "own").write_text(f"{own}\n")
    cgroup(machine / "fs" / folder, files, limit, 3 * GIB, GIB)
    assert free_memory.host_bytes() == expected


def counted(rank: int, pools: list[dict[str, int]]) -> int:
    dist.init_process_group("gloo")
    free_memory._pools = lambda: pools[rank]
    return free_memory.counted_host_bytes()


def test_ranks_that_share_a_machine_or_a_cgroup_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on one machine, two of them in one container; whatever the launcher says."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    pools = [{"a": 60, "container": 20}, {"a": 60, "container": 20}, {"a": 60}, {"b": 50, "other": 90}]
    assert run_ranks(counted, 4, pools) == [10, 10, 20, 50]
