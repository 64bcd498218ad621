"""What a script may request of the forward-backward function and schedules refuse, in one line."""

import pytest
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners import flushed
from megatron_pp_ext.request import source
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import linear
from tests.support.ranks import run_ranks


@pytest.fixture
def pipeline():
    chosen = requested.Pipeline(source.from_catalogue("1f1b", linear(2)), linear(2))
    requested.activate(chosen)
    yield chosen
    requested.activate(None)


def contract(**changed):
    nothing = dict.fromkeys(("forward_step_func", "data_iterator", "model"))
    return {**nothing, "num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1, **changed}


def test_distillation_is_refused(pipeline):
    runner = stock_schedules.get_forward_backward_func()
    assert isinstance(runner, flushed.FlushedRunner)
    with pytest.raises(ValueError, match="does not support modelopt's distillation"):
        runner(**contract(adjust_tensor_shapes_fn=lambda *shapes: shapes))


def test_several_modules_are_refused(pipeline):
    modules = MultiModuleProcessGroupCollection.__new__(MultiModuleProcessGroupCollection)
    with pytest.raises(ValueError, match="does not support MIMO"):
        stock_schedules.get_forward_backward_func(2, None, modules)
    with pytest.raises(ValueError, match="does not support MIMO"):
        stock_schedules.get_forward_backward_func()(**contract(pg_collection=modules))


def compare(rank: int) -> str:
    """Ranks 0 and 1 are one pipeline, 2 and 3 another, with another schedule."""
    dist.init_process_group("gloo")
    flushed.require_same_on_all(catalog.build("1f1b", 2, 4))
    with pytest.raises(RuntimeError) as error:
        flushed.require_same_on_all(catalog.build("1f1b" if rank < 2 else "gpipe", 2, 4))
    return str(error.value)


def test_all_pipelines_of_a_job_run_one_schedule() -> None:
    for error in run_ranks(compare, 4):
        assert "ranks 0 and 2 of this job built different schedules" in error
