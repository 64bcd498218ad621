"""A feature in a folder of its own: the example of docs/extending.md."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"

USE = """
import logging
import sys
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from unittest.mock import MagicMock

import late_weights
import torch
from late_weights.order import LateWeights, read
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.job.our_flags import add_flags
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Kind

flags = add_flags(ArgumentParser()).parse_args(["--pipeline-late-weights"])
request = named("zb-h1", 2, 4)
asked = read(SimpleNamespace(args=flags), request)
plain, late = make(request).schedule, make(asked).schedule
assert plain.orders != late.orders and {*plain.orders[0]} == {*late.orders[0]}
assert [action.kind for action in late.orders[0]][-4:] == [Kind.W] * 4

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
channels = MagicMock()
channels.receive.return_value = torch.zeros(1)
for schedule in plain, late:
    stage = SimpleNamespace(**{
        name: lambda *about: torch.zeros(1)
        for name in ("forward", "backward", "backward_input", "backward_weight")
    })
    execute(plan_rank(schedule, 0), Rank({0: stage}, channels))
"""


def test_the_feature_of_the_page_works_from_a_folder_of_its_own(tmp_path: Path) -> None:
    _, _, section = DOCUMENT.read_text().partition("## A new feature")
    section, _, _ = section.partition("\n## ")
    folder = tmp_path / "late_weights"
    folder.mkdir()
    files = re.findall(r"`late_weights/([a-z_]+\.\w+)`:\n\n```\w+\n(.*?)```", section, re.DOTALL)
    assert [name for name, _ in files] == ["flags.toml", "order.py", "operations.py", "__init__.py"]
    for name, text in files:
        (folder / name).write_text(text)
    ended = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["4 weight gradients are left"]
