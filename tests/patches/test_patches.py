"""The patches for a checkout's own script apply at their lines and add what the script needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("megatron-*.patch"))
CHECKOUT = Path(os.environ.get("MEGATRON_LM", "/no checkout"))
ADDED = "from megatron_pp_ext.launch import install\ninstall()\n\n"
HUNK = re.compile(r"@@ -(?P<old>\d+),(?P<before>\d+) \+(?P<new>\d+),(?P<after>\d+) @@\n")

needs_checkout = pytest.mark.skipif(
    not (CHECKOUT / "pretrain_gpt.py").exists(), reason="MEGATRON_LM does not name a Megatron-LM checkout"
)


def apply(patch: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # In a repository git would take the paths from its root and skip the rest.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--verbose", str(patch)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_it_adds_two_lines_where_it_says(patch: Path, tmp_path: Path) -> None:
    """It is applied to a file of nothing but the lines around them, at their place."""
    header, body = patch.read_text().split("@@", 1)
    assert header == "--- a/pretrain_gpt.py\n+++ b/pretrain_gpt.py\n"
    hunk = HUNK.match("@@" + body)
    assert hunk
    lines = body.splitlines(keepends=True)[1:]
    context = [line[1:] for line in lines if line[0] == " "]
    assert len(context) == int(hunk["before"]) <= 4
    assert "".join(line[1:] for line in lines if line[0] == "+") == ADDED
    before = ["pass\n"] * (int(hunk["old"]) - 1)
    (tmp_path / "pretrain_gpt.py").write_text("".join(before + context))
    done = apply(patch, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "offset" not in done.stderr
    patched = (tmp_path / "pretrain_gpt.py").read_text()
    assert patched == "".join(before + context[:1]) + ADDED + "".join(context[1:])


def patched_checkout(folder: Path) -> Path:
    """Link the checkout into ``folder``, its script as a patched file; return the script."""
    for entry in CHECKOUT.iterdir():
        if entry.name not in ("pretrain_gpt.py", ".git"):
            (folder / entry.name).symlink_to(entry)
    script = folder / "pretrain_gpt.py"
    script.write_text((CHECKOUT / "pretrain_gpt.py").read_text())
    release = re.search(
        r"^MAJOR = (\d+)\nMINOR = (\d+)", (CHECKOUT / "megatron/core/package_info.py").read_text(), re.M
    )
    assert release
    for patch in PATCHES:
        if patch.stem.startswith(f"megatron-{release[1]}.{release[2]}."):
            done = apply(patch, folder)
            assert done.returncode == 0, done.stderr
            assert "offset" not in done.stderr
            return script
    pytest.skip(f"there is no patch for Megatron {release[1]}.{release[2]}")


@pytest.mark.checkout
@needs_checkout
def test_it_applies_to_the_checkout_and_trains(tmp_path: Path) -> None:
    """The patched script runs without the launcher, though on a CPU the stand-ins are needed."""
    script = patched_checkout(tmp_path)
    assert script.read_text().index(ADDED) < script.read_text().index("from megatron.")
    starter = tmp_path / "start_on_cpu.py"
    starter.write_text(
        "import runpy, sys\n"
        "from megatron_pp_ext import cpu\n"
        "cpu.install()\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    # These import Megatron, which the other tests do not need.
    from megatron_pp_ext.cpu.flags import with_cpu_flags
    from tests.support.training import TINY

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(starter), str(script), *with_cpu_flags([*TINY, "--mock-data"])]
    command += ["--pipeline-model-parallel-size", "2"]

    def losses(*flags: str) -> list[str]:
        run = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
        return re.findall(r"lm loss: (\S+)", run.stdout)

    stock = losses()
    assert len(stock) == 3
    assert losses("--pipeline-schedule", "1f1b") == stock
