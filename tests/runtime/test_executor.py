"""The executor on plain torch stages: the gradients of one process, under every family."""

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime import module_stage as stage_module
from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.module_stage import ModuleStage
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE, SplitLinear
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.ranks import RankError, run_ranks

WIDTH, ROWS = 6, 3


def make_module(stage: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    layer = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), SplitLinear(WIDTH, WIDTH), torch.nn.GELU())
    return layer.double()


def microbatch_data(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.double)


def loss(output: torch.Tensor, microbatch: int) -> torch.Tensor:
    return (output * (microbatch + 1)).square().mean()


def run_schedule(rank: int, schedule: Schedule) -> dict:
    """Run one step and tell the gradients, the losses and the peak of this rank."""
    dist.init_process_group("gloo")
    pipeline = list(range(schedule.ranks))
    stages = {}
    for number in schedule.placement.stages_of(rank):
        is_last = number == schedule.placement.stages - 1
        stages[number] = ModuleStage(
            number,
            make_module(number),
            first_inputs=microbatch_data if number == 0 else None,
            loss=loss if is_last else None,
        )
    channels = Channels(
        pipeline, *direction_groups(pipeline), (ROWS, WIDTH), torch.double, torch.device("cpu")
    )
    recorder = StepRecorder(p for stage in stages.values() for p in stage.module.parameters())
    with recorder.step():
        execute(plan_rank(schedule, rank), stages, channels, recorder)
    return {
        "gradients": {n: [p.grad for p in s.module.parameters()] for n, s in stages.items()},
        "losses": stages[schedule.placement.stages - 1].losses
        if number == schedule.placement.stages - 1
        else {},
        "order": [event.action for event in recorder.record.events],
        "peak": recorder.record.peak_microbatches,
        "left": (len(STORE), recorder.meter.live_bytes),
    }


def in_one_process(stages: int, microbatches: int) -> dict[int, list[torch.Tensor]]:
    modules = [make_module(stage) for stage in range(stages)]
    for microbatch in range(microbatches):
        output = microbatch_data(microbatch)
        for module in modules:
            output = module(output)
        loss(output, microbatch).backward()
    return {stage: [p.grad for p in module.parameters()] for stage, module in enumerate(modules)}


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 3), (4, 2), (4, 9)])
def test_gradients_are_those_of_one_process(name, ranks, microbatches):
    schedule = catalog.build(name, ranks, microbatches)
    results = run_ranks(run_schedule, ranks, schedule)
    expected = in_one_process(schedule.placement.stages, microbatches)
    for rank, result in enumerate(results):
        assert tuple(result["order"]) == schedule.orders[rank]
        assert result["left"] == (0, 0)
        for stage, gradients in result["gradients"].items():
            assert all(map(torch.equal, gradients, expected[stage])), f"stage {stage}"


@pytest.mark.parametrize("name", catalog.NAMES)
def test_measured_peak_is_the_simulated_one(name):
    schedule = catalog.build(name, 4, 10)
    peaks = simulate(schedule, Costs.unit(schedule.placement)).peak_activations
    results = run_ranks(run_schedule, 4, schedule)
    assert tuple(result["peak"] for result in results) == peaks


def test_a_rank_that_dies_ends_the_others(monkeypatch):
    schedule = catalog.build("zb-h1", 3, 6)
    with pytest.raises(RankError, match="died on purpose"):
        run_ranks(_die_in_the_middle, 3, schedule, timeout=30)


def _die_in_the_middle(rank: int, schedule: Schedule) -> None:
    if rank == 1:

        class Dying(ModuleStage):
            def backward_weight(self, microbatch: int) -> None:
                if microbatch == 2:
                    raise SystemExit("died on purpose")
                super().backward_weight(microbatch)

        stage_module.ModuleStage = Dying  # type: ignore[misc]
        globals()["ModuleStage"] = Dying
    run_schedule(rank, schedule)
