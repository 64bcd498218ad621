"""mpp doctor: what it finds, and its exit status."""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import types
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from megatron_pp_ext.megatron import doctor, releases

COMMAND = [sys.executable, "-c", "from megatron_pp_ext.cli import app; app()", "doctor"]


PLUGIN = """
import functools
from megatron.core.pipeline_parallel import schedules

def logged(stock):
    @functools.wraps(stock)
    def call(*args, **kwargs):
        return stock(*args, **kwargs)
    return call

schedules.get_forward_backward_func = logged(schedules.get_forward_backward_func)
"""


def examine(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, cwd=folder)


def test_all_hooks_fit_the_installed_megatron(tmp_path: Path) -> None:
    """They fit where a plugin wraps a function, which is named."""
    (tmp_path / "other_plugin.py").write_text(PLUGIN)
    run = examine("--full", "--plugin", "other_plugin", folder=tmp_path)
    assert run.returncode == 0, run.stdout
    changed = run.stdout.partition("Changed by other packages")[2].partition("Missing")[0]
    where, function = "schedules.get_forward_backward_func", "other_plugin.logged.<locals>.call"
    (row,) = [line for line in changed.splitlines() if line.startswith("│ ")]
    assert where in row and function in row and "wraps it" in row
    for word in (
        "python",
        "megatron-core",
        "training.get_model",
        "get_forward_backward_func",
        "compile_helpers",
        "Workarounds of Megatron's own defects",
        "--iterations-to-skip on every rank that reads",
        "hardware queues",
        "MEGATRON_PP_SCHEDULE has no effect before mpp activate",
        "Hangs: every schedule is proved free of them",
    ):
        assert word in run.stdout
    assert not re.search(r"│ no +│$", run.stdout, re.MULTILINE)
    # What a CPU adds is told apart from what is always replaced.
    assert "--cpu: " in run.stdout
    verdict = run.stdout.splitlines()[0]
    assert re.match(r"ready: Megatron 0\.\d+\S* fits; ", verdict)
    assert "--cpu" in verdict or torch.cuda.is_available()
    version = re.search(r"Megatron (\S+) fits", verdict)[1].partition("+")[0]
    assert run.stdout.splitlines()[1].startswith(f"Its hooked functions are those of {version} (NVIDIA/")


def test_frameworks_that_are_here_are_told_with_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    (tried,), (same,) = (doctor.TRIED[name] for name in ("megatron-bridge", "mcore-bridge"))
    found = {"megatron-bridge": "9.9.9", "mcore-bridge": same, "verl": "1.2"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setitem(doctor.TRIED, "verl", ())
    assert [*doctor.here()] == [
        ("megatron-bridge", "9.9.9", f"no, but {tried} was"),
        ("mcore-bridge", same, "yes"),
        ("verl", "1.2", "no, its source was read"),
    ]


def test_what_was_tried_is_what_tests_install() -> None:
    lines = (Path(__file__).parents[1] / "frameworks" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert {name: tried for name, tried in doctor.TRIED.items() if tried} == {
        name: (pinned[name],) for name in doctor.TRIED if name in pinned
    }


def test_a_plugin_that_is_not_there_gets_one_line() -> None:
    with pytest.raises(ValueError, match=r"^--plugin no_such_plugin cannot be imported \(No module named"):
        doctor.import_plugins(["no_such_plugin"])


def test_another_megatron_is_refused_by_name(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("__version__ = '0.99.0'\n")
    run = examine("--megatron", str(tmp_path))
    assert run.returncode == 1
    assert run.stdout.splitlines()[0].startswith("not ready: megatron-core is 0.99.0, known are 0.16.x")


def test_without_megatron_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setattr(doctor, "problem_of_import", lambda: "install megatron-core[training]")
    console = Console(file=io.StringIO(), width=120)
    doctor.examine(console, None, lambda what: nullcontext())
    shown = console.file.getvalue()
    assert shown.splitlines()[0] == "not ready: install megatron-core[training]"
    assert "Messages between ranks" not in shown, "what is not asked for is left out"


@pytest.mark.skipif(shutil.which("git") is None, reason="without git there is no commit")
@pytest.mark.parametrize("tracked", [True, False])
def test_a_commit_is_megatrons_only_in_its_own_repository(tracked: bool, tmp_path: Path, monkeypatch) -> None:
    core = tmp_path / "environment" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "other").write_text("")
    for words in (("init", "-q"), ("add", "." if tracked else "other"), (*author, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    head = ("git", "-C", str(tmp_path), "rev-parse", "--short=8", "HEAD")
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    found = types.SimpleNamespace(__version__="0.19.2+abc1234", __path__=[str(core)])
    monkeypatch.setitem(sys.modules, "megatron.core", found)
    assert releases.own_megatron_version() == (f"0.19.2+{commit}" if tracked else "0.19.2")


def test_a_folder_without_megatron_gets_one_line(mpp, tmp_path: Path) -> None:
    result = mpp("doctor", "--megatron", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} has no megatron/core" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine with everything; what is named is missing, or another version than usual."""

    def make(gpu: bool = True, packages: dict = {}, modules: tuple = (), nvcc: bool = True) -> dict[str, str]:  # noqa: B006
        versions = {"transformer-engine": "2.10.0", "apex": "0.1", **packages}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(doctor, "_version", versions.get)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else object())
        monkeypatch.setattr(shutil, "which", lambda name: "nvcc" if nvcc else None)
        return dict(doctor.lacking())

    return make


def test_each_lack_has_its_consequence(machine) -> None:
    assert machine() == {}
    assert "pip install pybind11" in machine(modules=("pybind11",))["pybind11"]
    assert "--cpu" in machine(gpu=False)["a GPU that torch can use"]
    assert "--transformer-impl local" in machine(packages={"transformer-engine": None})["transformer-engine"]
    (old,) = machine(packages={"transformer-engine": "2.2.1+cu13"}).items()
    assert old[0] == "transformer-engine 2.3 or newer"
    assert "2.2.1+cu13 cannot split its backward" in old[1]
    assert "this package does not" in machine(nvcc=False)["nvcc"]


def test_the_apex_of_another_project_is_told_apart(machine) -> None:
    kernels = "fused_weight_gradient_mlp_cuda"
    absent = machine(packages={"apex": None}, modules=(kernels,))["NVIDIA apex"]
    stranger = machine(modules=(kernels, "apex.optimizers"))["NVIDIA apex"]
    assert "another project" in stranger
    assert "another project" not in absent
    assert "--no-gradient-accumulation-fusion" in absent


def test_the_verdict_names_the_flags_that_this_machine_needs(machine) -> None:
    machine()
    assert doctor.how_to_start() == "scripts start as they are"
    machine(gpu=False)
    assert "start scripts with --cpu" in doctor.how_to_start()
    machine(packages={"transformer-engine": None}, modules=("fused_weight_gradient_mlp_cuda",))
    assert "--transformer-impl local --no-gradient-accumulation-fusion" in doctor.how_to_start()


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch):
    """A torch that has these NCCL backends beside "nccl", or none at all, and these settings."""

    def make(*backends: str, nccl: bool = True, hip: str | None = None, **settings: str) -> dict[str, str]:
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "CUDA_MODULE_LOADING"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
        monkeypatch.setattr(dist, "is_backend_available", lambda name: name in backends)
        for backend, made in (("nccl2", "ProcessGroupNCCL2"), ("nccl-lazy", "ProcessGroupNCCLLazy")):
            if backend in backends:
                monkeypatch.setattr(dist.distributed_c10d, made, object, raising=False)
        monkeypatch.setattr(torch.version, "hip", hip)
        return dict(doctor.messages())

    return make


def test_what_stands_behind_nccl(torch_with) -> None:
    newest = ("nccl2", "nccl-lazy")
    found = torch_with(*newest)
    assert found['"nccl" stands for'].startswith("nccl2")
    assert found["nccl-lazy"] == "available"
    assert found["pipeline messages"].startswith("nccl-lazy: ")
    found = torch_with(*newest, TORCH_DIST_USE_NCCL2="0")
    assert found['"nccl" stands for'] == "nccl-legacy, since TORCH_DIST_USE_NCCL2=0"
    found = torch_with()
    assert found['"nccl" stands for'] == "the only NCCL backend of this torch"
    assert found["nccl-lazy"] == "not in this torch"
    assert found["pipeline messages"].startswith("nccl: ")


@pytest.mark.parametrize(("version", "text"), [((2, 30, 7), "2.30.7"), ((2, 27, 3, "rc1"), "2.27.3.rc1")])
def test_the_version_of_nccl(version: tuple, text: str, torch_with, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(doctor, "loaded_nccl", lambda: version[:3])
    assert torch_with()["NCCL"] == text
    monkeypatch.setattr(doctor, "loaded_nccl", lambda: (2, 31, 2))
    assert torch_with()["NCCL"] == f"2.31.2; torch was built with {text}"


def test_nccl_or_its_version_may_be_missing(torch_with, monkeypatch) -> None:
    found = torch_with(nccl=False)
    assert found["NCCL"] == "not in this torch"
    assert found["pipeline messages"].startswith("gloo: ")
    assert "nccl-lazy" not in found
    monkeypatch.delattr(torch._C, "_nccl_version", raising=False)
    monkeypatch.setattr(doctor, "loaded_nccl", lambda: None)
    assert torch_with()["NCCL"] == "torch does not report its version"


def test_hardware_queues_and_loading(torch_with) -> None:
    found = torch_with()
    assert found["hardware queues"] == "8 (CUDA_DEVICE_MAX_CONNECTIONS is not set)"
    assert found["modules are loaded"] == "LAZY (CUDA_MODULE_LOADING is not set)"
    found = torch_with(CUDA_DEVICE_MAX_CONNECTIONS="1", CUDA_MODULE_LOADING="EAGER")
    assert found["hardware queues"] == "1 (CUDA_DEVICE_MAX_CONNECTIONS)"
    assert found["modules are loaded"] == "EAGER (CUDA_MODULE_LOADING)"
    on_amd = torch_with(hip="7.0", GPU_MAX_HW_QUEUES="2", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert on_amd["hardware queues"] == "2 (GPU_MAX_HW_QUEUES)"
    assert "modules are loaded" not in on_amd
