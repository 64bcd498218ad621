"""The wheel holds all that the package reads: it is built, installed elsewhere and used there."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    package = ROOT / "megatron_pp_ext"
    files = (file for file in package.rglob("*") if file.is_file() and file.parent.name != "__pycache__")
    ours = {str(file.relative_to(ROOT)) for file in files}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == ours


def test_an_index_shows_readme_with_links_that_lead_somewhere(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert re.findall(r"\]\((?!https://)[^)#]*\)", metadata) == []
    assert re.search(
        r"!\[.*\]\(https://raw\.githubusercontent\.com/\w+/megatron_pp_ext/main/docs/\S+png\)", metadata
    )


def test_plans_need_no_torch(wheel: Path) -> None:
    """What the planner, schedules and pictures need is installed without torch; [train] adds it."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    of_training = [need for need in needs if re.match(r"torch\b|megatron", need)]
    assert of_training
    assert all("extra ==" in need for need in of_training)


@pytest.mark.wide
def test_it_works_elsewhere(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(installed)
    elsewhere.mkdir()

    def python(*words: str) -> str:
        """What a Python prints that finds the package in ``installed`` alone."""
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        shown = subprocess.run(
            [sys.executable, *words],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr
        return shown.stdout

    assert python("-c", "import megatron_pp_ext; print(megatron_pp_ext.__file__)").startswith(str(installed))
    assert "v-half" in python("-m", "megatron_pp_ext.cli", "list")
    words = "estimate --no-ask --model llama3-8b --system a100-80g --world-size 8"
    words += " -- --pipeline-model-parallel-size 4"
    batch = "--micro-batch-size 1 --global-batch-size 16 --pipeline-schedule v-half"
    assert "a100-80g" in python("-m", "megatron_pp_ext.cli", *words.split(), *batch.split())

    # The scripts that a search writes name the batch script, which SLURM would start.
    words = "search --model llama3-8b --gpus 8 --global-batch-size 8 --schedules 1f1b --top 1 --sbatch jobs"
    python("-m", "megatron_pp_ext.cli", *words.split())
    (script,) = (elsewhere / "jobs").iterdir()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nDRY_RUN=1 exec bash "$@"\n')
    sbatch.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        [script], env=environment, cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "--kill-on-bad-exit=1" in run.stdout
    assert "--global-batch-size 8" in run.stdout
