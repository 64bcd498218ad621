"""Between its launches a step reads nothing from the device and sends no objects, as a capture demands.

``--cuda-graph-impl full_iteration`` captures a whole step.  A value that the host reads from a tensor would
be that of the capture in every replay, and on a GPU the capture fails.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_pp_ext
from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
from tests.support import training
from tests.support.tiers import first

CORE, PACKAGE = (str(Path(module.__path__[0])) for module in (megatron.core, megatron_pp_ext))

READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero}
"""Operations whose result the host waits for."""

OBJECTS = (
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "send_object_list",
    "recv_object_list",
)


def reader() -> str:
    """Return the file of Megatron or of this package, or else of the test, that calls an operation."""
    files = [frame.filename for frame in traceback.extract_stack()[:-2]]
    callers = [file for file in files if file.startswith((CORE, PACKAGE))]
    return (callers or files)[-1]


class NoReads(TorchDispatchMode):
    """Refuses ``READS`` but for those of Megatron's layers; ``launched`` counts all other operations.

    Layers are captured under Megatron's own schedules, too.  On a CPU their random numbers have states that
    the host reads.
    """

    launched = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.overloadpacket in READS and not reader().startswith(CORE):
            raise AssertionError(f"the host reads a tensor by {operation}")
        self.launched += 1
        return operation(*args, **(kwargs or {}))


@contextmanager
def capturing() -> Iterator[NoReads]:
    """Stand in for a capture of all that runs within."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("objects are sent")

    with pytest.MonkeyPatch.context() as patch, NoReads() as mode:
        for name in OBJECTS:
            patch.setattr(dist, name, refused)
        yield mode


def captured_steps(chunks: list[torch.nn.Module]) -> None:
    """Run every step of this rank but the first, which warms up, as in a capture."""
    training.initialize_by_layer(chunks)
    run, steps = PipelineRunner._run, 0

    def watched(self: PipelineRunner, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            run(self, *args)
            return
        with capturing() as mode:
            run(self, *args)
        assert mode.launched > 100

    PipelineRunner._run = watched  # type: ignore[method-assign]


SCHEDULES = "v-half", "zb-h1", "1f1b", "interleaved", "gpipe", "interleaved-zb", "1f1b-v", "v-min", "v-zb"


@pytest.mark.parametrize("schedule", first(1, SCHEDULES))
def test_a_step_can_be_captured(schedule: str) -> None:
    chunks = ["--num-virtual-stages-per-pipeline-rank", "2"] if "interleaved" in schedule else []
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule, *chunks]
    runs = training.train(2, flags, initialize=captured_steps)
    assert all(len(run.grad_norms) == 3 for run in runs)


def test_a_step_that_reads_a_loss_cannot() -> None:
    with pytest.raises(AssertionError, match="the host reads a tensor"), capturing():
        torch.ones(1).item()
