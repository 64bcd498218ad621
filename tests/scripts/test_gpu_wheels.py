"""scripts/gpu_wheels.sh packs what another machine lacks. pip is a stand-in; nothing is fetched."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.missing_packages import listed, needed

ROOT = Path(__file__).parents[2]

ELSEWHERE = """Package            Version
------------------ ------------
torch              2.11.0+cu130
numba              0.60.0
nvidia-nccl-cu13   2.28.9
matplotlib         3.11.2
PyYAML             6.0.3
typing_extensions  4.16.0
"""

PIP = """#!/bin/bash
if [[ "$1 $2" != "-m pip" ]]; then exec REAL "$@"; fi
echo "$*" > CALLED
while [[ "$1" != --dest ]]; do shift; done
touch "$2/megatron_core-0.whl"
"""


def missing(text: str) -> dict[str, str]:
    return {one.name: str(one.specifier) for one in needed(listed(text))}


@pytest.mark.parametrize(
    "text", ["torch 2.11.0+cu130\nA_b.c 1", "torch==2.11.0\na-b-c==1\n# a comment", "Torch\na.B_c"]
)
def test_a_list_is_read_in_any_form(text: str) -> None:
    assert set(listed(text)) == {"torch", "a-b-c"}


def test_what_is_missing_is_what_is_installed_here(capsys: pytest.CaptureFixture) -> None:
    """What torch needs is not asked for where torch is: it has its own there."""
    found = missing(ELSEWHERE)
    assert found["megatron-core"] == f"=={version('megatron-core')}"
    assert {"rich", "typer", "psutil", "pytest", "pygments", "transformers"} <= set(found)
    assert not {"torch", "triton", "nvidia-cublas", "numba", "llvmlite", "pyyaml", "ruff", "mypy"} & set(
        found
    )
    assert "the list has numba 0.60.0, but numba>=0.61 is needed" in capsys.readouterr().err


def test_what_another_platform_needs_is_not_missing() -> None:
    assert "colorama" not in missing("torch 2.11.0")


def pack(tmp_path: Path, text: str) -> str:
    python = tmp_path / "python"
    python.write_text(PIP.replace("REAL", sys.executable).replace("CALLED", str(tmp_path / "called")))
    python.chmod(0o755)
    (tmp_path / "list").write_text(text)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_wheels.sh"), "list", "wheels"],
        env={**os.environ, "PYTHON": str(python)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_script_says_how_to_install_what_it_has_packed(tmp_path: Path) -> None:
    out = pack(tmp_path, ELSEWHERE)
    words = (tmp_path / "called").read_text().split()
    assert f"megatron-core=={version('megatron-core')}" in words
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_28_x86_64"} <= set(words)
    assert words[words.index("--python-version") + 1] == "3.12"
    assert "wheels has 1 wheels" in out
    assert "pip install --no-index --no-deps --target carried wheels/*.whl" in out
    assert "PYTHONPATH=$PWD/carried scripts/gpu_check.sh" in out


def test_where_nothing_is_missing_nothing_is_packed(tmp_path: Path) -> None:
    everything = "\n".join(["torch", "numba", *missing("torch\nnumba")])
    assert "nothing is missing in list" in pack(tmp_path, everything)
    assert not (tmp_path / "called").exists()
