"""The core and the runners work for a trainer that is not Megatron's own."""

import subprocess
import sys

NO_TRAINER = """
import importlib, pkgutil, sys
from megatron_pp_ext import cpu

cpu.install()

class NoTrainer:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["megatron", "training"]:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, NoTrainer())
"""

EVERY_MODULE = """
from megatron_pp_ext.integration import core, runners

for room in (core, runners):
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        importlib.import_module(module.name)
"""

RUNNERS = """
from megatron.core.pipeline_parallel import schedules
from megatron_pp_ext.integration import core_seams, patching, requested, start_up
from megatron_pp_ext.job.measurements import ProfileSteps
from megatron_pp_ext.job.request import named
from megatron_pp_ext.job.source import source_of
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import loop

patching.apply(core_seams.CORE)

def costs(stages, shares_vocabulary=False):
    return Costs.unit(loop(2, stages // 2))

for name, more in (("v-half", {}), ("zb-h1", {"profile_steps": ProfileSteps(2, 3)}), ("auto", {})):
    request = named(name, 2, 4)
    pipeline = requested.Pipeline(request, source_of(request, costs), **more)
    print(start_up.summary(pipeline, costs))
    requested.activate(pipeline)
    print(type(schedules.get_forward_backward_func()).__name__)
"""


def run_without_trainer(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", NO_TRAINER + program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_core_gives_runners_where_there_is_no_trainer() -> None:
    """Every module is imported; the settings are those of a loop that says nothing of itself."""
    lines = run_without_trainer(EVERY_MODULE + RUNNERS).splitlines()
    assert lines[1::2] == ["PipelineRunner"] * 3
    names = [line.partition(":")[0] for line in lines[::2]]
    assert names == ["v-half", "zb-h1", "auto"]
