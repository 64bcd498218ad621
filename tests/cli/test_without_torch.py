"""Every command where there is neither torch nor Megatron: it works, or names the extra that it needs.

A process in which both cannot be imported stands in for an environment without them, which
scripts/test_first_minutes.py makes for the commands of README.
"""

import json
import subprocess
import sys
from pathlib import Path

import typer

from megatron_pp_ext.cli import app
from reference import vgg16

JOB = (
    "-- --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 --lr 0.001 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2 --pipeline-schedule v-half"
)
EXTRA = "mpp: torch is not installed: pip install 'megatron_pp_ext[train]'"

LINES = {
    "list": ("list", ""),
    "schedule": ("schedule v-half -p 2 -m 4 --png a.png --html a.html --csv a.csv --trace a.trace", ""),
    "simulate": ("simulate a.csv", ""),
    "compare": ("compare -p 2 -m 1 --html b.html", ""),
    "trace": ("trace a.trace", ""),
    "models": ("models", ""),
    "estimate": (f"estimate --no-ask {JOB}", ""),
    "search": (
        "search --no-ask --gpus 2 --model llama3-8b --seq-length 512 --global-batch-size 2 --schedules 1f1b",
        "",
    ),
    "search --measure": (f"search --no-ask --gpus 2 --measure {JOB}", EXTRA),
    "partition": ("partition graph.txt --workers 2 --bandwidth 1e9", ""),
    "profile": ("profile graph.txt", ""),
    "profile of a model": (f"profile new.json {JOB}", EXTRA),
    "activate": ("activate", ""),
    "deactivate": ("deactivate", ""),
    "doctor": ("doctor", EXTRA),
    "calibrate": ("calibrate system.json", EXTRA),
    "rehearse": (f"rehearse {JOB}", EXTRA),
    "verify": (f"verify {JOB}", EXTRA),
    "verify on a CPU": (f"verify --cpu {JOB}", EXTRA),
}
"""A line for each command, in an order in which files are written before they are read, and what it lacks."""

PROGRAM = """
import json, sys
from pathlib import Path
sys.modules |= {"torch": None, "megatron": None}
from typer.testing import CliRunner
from megatron_pp_ext import startup_file
from megatron_pp_ext.cli import app
startup_file.path = lambda: Path("startup.pth")
for line in sys.argv[1:]:
    result = CliRunner().invoke(app, line.split())
    print(json.dumps([result.exit_code, result.stdout, result.stderr, repr(result.exception)]))
"""


def test_a_command_works_or_names_the_extra(tmp_path: Path) -> None:
    assert {line.split()[0] for line, _ in LINES.values()} == set(typer.main.get_command(app).commands)
    (tmp_path / "graph.txt").write_text(vgg16.graph_txt())
    words = [sys.executable, "-c", PROGRAM, *(line for line, _ in LINES.values())]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wrong = {}
    for (name, (_, problem)), result in zip(LINES.items(), done.stdout.splitlines(), strict=True):
        code, printed, errors, exception = json.loads(result)
        is_right = (code, errors) == (2, f"{problem}\n") if problem else code == 0 and printed
        if not is_right:
            wrong[name] = code, printed[-500:], errors[-500:], exception
    assert wrong == {}
