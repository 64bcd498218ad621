"""The dataset helpers of a checkout, which are built for the Python that trains."""

import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_pp_ext.integration.workarounds import dataset_helpers

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def checkout(folder: Path, recipe: str) -> Path:
    """A folder whose Makefile, as that of Megatron, would build for the first python3 of the search path."""
    lines = ["CPPFLAGS += $(shell false)", "LIBEXT = .another", "default: helpers_cpp$(LIBEXT)"]
    (folder / "Makefile").write_text("\n".join([*lines, f"helpers_cpp$(LIBEXT):\n\t{recipe}\n"]))
    return folder


@needs_make
def test_they_are_built_for_this_python_with_torchs_pybind11(tmp_path: Path) -> None:
    dataset_helpers.build(checkout(tmp_path, "echo '$(CPPFLAGS)' > $@"))
    flags = (tmp_path / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}").read_text().split()
    pybind11, python = (Path(flag.removeprefix("-I")) for flag in flags)
    assert (pybind11 / "pybind11" / "pybind11.h").exists()
    assert python == Path(sysconfig.get_path("include"))


@needs_make
def test_what_fails_is_one_line_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without make, too."""
    recipe = "@echo working >&2; echo 'helpers.cpp:12: fatal error: Python.h: No such file' >&2; exit 1"
    with pytest.raises(ValueError, match=r"fatal error: Python.h: .*; install make, a C\+\+ comp") as error:
        dataset_helpers.build(checkout(tmp_path, recipe))
    assert "\n" not in str(error.value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"'make'.*; install make"):
        dataset_helpers.build(checkout(tmp_path, "true"))


def test_a_wheel_has_them_and_nothing_to_build_from(tmp_path: Path) -> None:
    assert dataset_helpers.are_built()
    dataset_helpers.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch without a copy of pybind11; the folder of a checkout's helpers."""
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(dataset_helpers.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    (tmp_path / "datasets").mkdir()
    return tmp_path / "datasets"


@needs_make
def test_an_installed_pybind11_is_taken(another_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pybind11", SimpleNamespace(get_include=lambda: "/headers of it"))
    dataset_helpers.build(checkout(another_torch, "echo '$(CPPFLAGS)' > $@"))
    (built,) = another_torch.glob("helpers_cpp*")
    assert "-I/headers of it" in built.read_text()


@needs_make
def test_they_are_built_where_megatron_would_run_make(
    another_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a job whose flags do not come from its command line, such as one of --yaml-cfg.

    Stock's make would go on without pybind11's headers, and end the job with the compiler's pages.
    """
    monkeypatch.setitem(sys.modules, "pybind11", None)
    monkeypatch.setattr(dataset_helpers, "are_built", lambda: False)
    monkeypatch.setattr(
        dataset_helpers.megatron.core.datasets, "__path__", [str(checkout(another_torch, "exit 1"))]
    )
    with pytest.raises(ValueError, match=r"without pybind11, .*: pip install pybind11") as error:
        dataset_helpers.skip_if_built(lambda: pytest.fail("stock ran make"))()
    assert "\n" not in str(error.value)
