"""The bytes that ranks keep of slices, by the activation meter, against those that their plans count.

What a backward computes again and drops is not metered, so it is left out of the plans' side too.
"""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron.start_up import estimate
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.recorded import RecordedStep
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import training
from tests.support.flags import arguments

LENGTH, TOKENS, MICROBATCHES = 128, 32, 8
MODEL = (
    f"--hidden-size 128 --seq-length {LENGTH} --max-position-embeddings {LENGTH} --vocab-size 256 "
    "--num-attention-heads 8 --pipeline-model-parallel-size 2 --disable-bias-linear"
)
HEADS = {"grouped queries": "--group-query-attention --num-query-groups 2", "many heads": ""}
RECOMPUTED = {
    "nothing": "",
    "attention": "--recompute-granularity selective",
    "layers": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
SCHEDULES = {"1f1b": "1f1b", "v-half": "v-half", "flex": "flex --pipeline-memory-limit 0.9"}
CASES = [*product(HEADS, RECOMPUTED, SCHEDULES)]

PROGRAM = """
import sys
from megatron_pp_ext.launch import install
from tests.support import ranks  # the stand-ins for torch.cuda, before Megatron is imported
install()
from tests.features.units.megatron import test_kept_bytes
flags, path, sys.argv = sys.argv[1], sys.argv[2], sys.argv[:1]
test_kept_bytes.trace(flags, path)
"""


def trace(flags: str, path: str) -> None:
    """Train two ranks for two steps, and write the trace of the last to ``path``."""
    training.train(2, ["--train-iters", "2", *flags.split(), "--pipeline-trace", path])


@cache
def step(flags: str, folder: Path) -> RecordedStep:
    """The recorded step, whose ranks train in a process of their own: others were seen to keep more."""
    path = folder / "step.json"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, flags, str(path)]
    ran = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return trace_file.read(path)


def rates(flags: str, stages: int) -> LengthCosts:
    """The costs of the model as training counts them, without what a backward alone has."""
    model = estimate(RequestedJob.of_args(arguments(flags)))
    halves, whole = (model.at(LENGTH // rows, rows).of(linear(stages)) for rows in (2, 1))
    counted = LengthCosts.through(halves, 2, whole, LENGTH)
    stripped = (
        replace(stage, workspace=0.0, workspace_in_whole=0.0, scores=(*stage.scores[:2], 0.0, 0.0))
        for stage in counted.stages
    )
    return replace(counted, stages=tuple(stripped))


@pytest.mark.wide
@pytest.mark.parametrize(("heads", "recomputed", "schedule"), CASES)
def test_ranks_keep_what_their_plan_counts(
    heads: str, recomputed: str, schedule: str, tmp_path: Path
) -> None:
    """Within 3% on each rank."""
    flags = f"{MODEL} {HEADS[heads]} {RECOMPUTED[recomputed]}"
    in_slices = f"--pipeline-slice-tokens {TOKENS} --pipeline-order rule"
    recorded = step(f"{flags} {in_slices} --pipeline-schedule {SCHEDULES[schedule]}", tmp_path)
    planner = Planner(recorded.placement, rates(flags, recorded.placement.stages))
    units = planner.cut([[LENGTH]] * MICROBATCHES, TOKENS)
    orders = tuple(tuple(event.action for event in record.events) for record in recorded.records)
    planned = simulate(Schedule(schedule, recorded.placement, len(units), orders), planner.costs(units))
    metered = [record.peak_bytes for record in recorded.records]
    assert metered == pytest.approx(planned.peak_activations, rel=0.03)
