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
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.megatron.patching import apply, hooks_of
from megatron_pp_ext.job import options
from megatron_pp_ext.job.flag_table import add_flags
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.planner.step.workload import additions
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import Costs

def asked(*words):
    flags = ["--pipeline-late-weights", *words]
    ranks = Namespace(pipeline_model_parallel_size=2)
    return RequestedJob.of_args(add_flags(ArgumentParser()).parse_args(flags, ranks))

request = named("zb-h1", 2, 4)
requested = options.read(asked(), request)
assert [option.about for option in requested.options] == ["weight gradients at the end of the step"]
plain, late = make(request).schedule, make(requested).schedule
assert plain.orders != late.orders and {*plain.orders[0]} == {*late.orders[0]}
assert [action.kind for action in late.orders[0]][-4:] == [Kind.W] * 4

costs = Costs.unit(late.placement)
assert additions()[-1].in_step(None, late, costs).stages[0].weight_gradient == 1.05
assert additions()[-1].in_step(None, plain, costs) == costs

all_rules.refuse(asked("--pipeline-schedule", "zb-h1"))
try:
    all_rules.refuse(asked("--pipeline-schedule", "zb-h1", "--pipeline-offload", "0.5"))
except ValueError as error:
    print(error)

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
channels = MagicMock()
channels.receive.return_value = torch.zeros(1)
for schedule in plain, late:
    stage = SimpleNamespace(**{
        name: lambda *about: torch.zeros(1)
        for name in ("forward", "backward", "backward_input", "backward_weight")
    })
    execute(plan_rank(schedule, 0), Rank({0: stage}, channels))

import megatron.core.distributed as distributed
apply(hooks_of(*FEATURES[-1].hooked()))
try:
    distributed.finalize_model_grads([])
except Exception:
    pass  # there is no model: Megatron's own function was called
"""


def test_the_feature_of_the_page_works_from_a_folder_of_its_own(tmp_path: Path) -> None:
    _, _, section = DOCUMENT.read_text().partition("## A new feature")
    section, _, _ = section.partition("\n## ")
    folder = tmp_path / "late_weights"
    folder.mkdir()
    files = re.findall(r"`late_weights/([a-z_]+\.\w+)`:\n\n```\w+\n(.*?)```", section, re.DOTALL)
    assert [name for name, _ in files] == [
        "flags.toml",
        "feature.py",
        "operations.py",
        "hooks.py",
        "estimates.py",
        "__init__.py",
    ]
    for name, text in files:
        (folder / name).write_text(text)
    ended = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    refusal, *logged = ended.stdout.splitlines()
    assert refusal == (
        "--pipeline-late-weights does not support --pipeline-offload: its copies are planned for weight "
        "gradients that come earlier; leave one of the two out"
    )
    assert [line for line in logged if line.startswith("pipeline: ")] == [
        "pipeline: 4 weight gradients are left",
        "pipeline: all weight gradients are there",
    ]
