"""Commands for a shell: it starts what was meant, whatever words files and users have."""

import subprocess
from pathlib import Path

import pytest

from megatron_pp_ext.planner.search.launch_lines import Launch, batch_file, one_a_line

FLAGS = [
    *("--bf16", "--spec", "$(touch pwned)", "$HOME", "--save", 'it\'s `a` "folder" & more; #1', "--load", ""),
    *("--pipeline-model-parallel-layout", "Et*3|(t*4|)*2L", "--data-path", "a\\b", "*", "~", "{1,2}", "!x"),
]


def started(script: str, folder: Path, command: str) -> list[str]:
    """The words with which a shell that is given ``script`` starts ``command``, in an empty folder."""
    (folder / command).write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" > words\n")
    (folder / command).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "MASTER_ADDR": "first", "HOME": "home"}
    subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, check=True)
    assert {path.name for path in folder.iterdir()} == {command, "words"}
    return (folder / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize("form", ["line", "text"])
def test_a_shell_starts_torchrun_with_these_words(form: str, tmp_path: Path) -> None:
    launch = Launch(FLAGS, gpus=16, gpus_per_node=8, script=Path("my $(touch pwned) script.py"))
    words = started(getattr(launch, form), tmp_path, "torchrun")
    assert words == [word.replace("$MASTER_ADDR", "first") for word in launch.torchrun[1:]]
    assert words[-len(FLAGS) - 1 :] == ["my $(touch pwned) script.py", *FLAGS]


def test_flags_one_a_line(tmp_path: Path) -> None:
    assert started(f"train {one_a_line(FLAGS)}", tmp_path, "train") == FLAGS


def test_a_batch_file_submits_these_words(tmp_path: Path) -> None:
    script = batch_file("a name", FLAGS, gpus=8, gpus_per_node=8, comment="what it is")
    assert started(script, tmp_path, "sbatch")[-len(FLAGS) :] == FLAGS
