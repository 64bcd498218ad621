"""On a GPU: messages between ranks, the recorder's clock, memory.

Several ranks share the device where NCCL lets them, and otherwise pass their messages through the host.
"""

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.gpu.sharing import FIRST_NCCL, SHARED
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups, loaded_nccl
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from tests.support.module_stage import ModuleStage
from tests.support.split_linear import SplitLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no CUDA device"),
]

LONGEST = 60
"""Seconds after which ranks count as hanging, which leaves time for the tests behind."""

ROWS, WIDTH, MICROBATCHES = 8, 64, 8
RESOLUTION = 2e-6
"""Seconds by which two pairs of events may differ, each event being resolved to half a microsecond."""


def _stage(stage: int, stages: int, device: torch.device) -> ModuleStage:
    torch.manual_seed(stage)
    module = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), SplitLinear(WIDTH, WIDTH), torch.nn.GELU())
    return ModuleStage(
        stage,
        module.to(device),
        first_inputs=(lambda microbatch: _input(microbatch, device)) if stage == 0 else None,
        loss=(lambda output, _: output.square().mean()) if stage == stages - 1 else None,
    )


def _input(microbatch: int, device: torch.device) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(microbatch)).to(device)


def _work(rank: int, ranks: int, backend: str, folder: str) -> None:
    """Run a step of every schedule, and leave this rank's gradients in a file."""
    os.environ.update(SHARED)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    pipeline = list(range(ranks))
    groups = direction_groups(pipeline)
    gradients = {}
    for name in catalog.NAMES:
        schedule = catalog.build(name, ranks, MICROBATCHES)
        placement = schedule.placement
        stages = {s: _stage(s, placement.stages, device) for s in placement.stages_of(rank)}
        channels = Channels(pipeline, *groups, (ROWS, WIDTH), torch.float, device)
        execute(plan_rank(schedule, rank), Rank(stages, channels))
        assert not len(STORE)
        gradients |= {
            (name, number, key): parameter.grad.cpu()
            for number, stage in stages.items()
            for key, parameter in stage.module.named_parameters()
        }
    torch.save(gradients, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _whole(stages: int) -> dict[tuple[int, str], torch.Tensor]:
    """The gradients of the same model in one piece, stage by stage and microbatch by microbatch."""
    device = torch.device("cuda", 0)
    modules = [_stage(stage, stages, device).module for stage in range(stages)]
    for microbatch in range(MICROBATCHES):
        torch.nn.Sequential(*modules)(_input(microbatch, device)).square().mean().backward()
    return {
        (stage, key): parameter.grad.cpu()
        for stage, module in enumerate(modules)
        for key, parameter in module.named_parameters()
    }


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gradients_equal_those_of_one_piece(ranks: int, backend: str, tmp_path: Path) -> None:
    version = loaded_nccl() or torch.cuda.nccl.version()
    if backend == "nccl" and ranks > torch.cuda.device_count() and version < FIRST_NCCL:
        pytest.skip("this NCCL does not let several ranks share a GPU (2.30 or newer does)")
    context = torch.multiprocessing.spawn(_work, (ranks, backend, str(tmp_path)), nprocs=ranks, join=False)
    end = time.monotonic() + LONGEST
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"the ranks have not ended in {LONGEST} s"
    finally:
        for process in context.processes:
            process.kill()
    found: dict[tuple[str, int, str], torch.Tensor] = {}
    for rank in range(ranks):
        found |= torch.load(tmp_path / str(rank))
    for name in catalog.NAMES:
        expected = _whole(catalog.build(name, ranks, MICROBATCHES).placement.stages)
        assert {key[1:] for key in found if key[0] == name} == expected.keys()
        for key, gradient in expected.items():
            assert torch.equal(found[name, *key], gradient), (name, key)


def test_the_recorder_reads_the_device_s_clock() -> None:
    """The host is done with an action long before the device is, whose own events tell how long it took."""
    recorder = StepRecorder()
    own: list[torch.cuda.Event] = []
    with recorder.step():
        for microbatch in range(2):
            with recorder.during(Action(0, Kind.F, microbatch)):
                own.append(_event())
                torch.cuda._sleep(100_000_000)
                own.append(_event())
    first, second = recorder.record.events
    # The recorder's marks are around the test's: its actions take longer, its gaps between them less.
    inner = [before.elapsed_time(after) / 1e3 for before, after in pairwise(own)]
    assert first.end - first.start >= inner[0] - RESOLUTION
    assert -RESOLUTION <= second.start - first.end <= inner[1] + RESOLUTION
    assert second.end - second.start >= inner[2] - RESOLUTION


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
