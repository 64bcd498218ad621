"""Patching Megatron: all seams or none, and nothing changes until a schedule is asked for."""

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.training.training as trainer
import pytest
from comparison import assert_same_bits, run

from megatron_pp_ext.integration import seams


@pytest.fixture
def unpatched():
    """Stock Megatron for one test."""
    seams.undo()
    yield
    seams.undo()
    seams.apply()


def test_apply_and_undo(unpatched):
    stock_function = schedules.get_forward_backward_func
    seams.apply()
    assert seams.is_applied()
    assert schedules.get_forward_backward_func is not stock_function
    # Importers that took the function by name got the new one too.
    assert trainer.get_forward_backward_func is schedules.get_forward_backward_func
    seams.apply()
    seams.undo()
    assert not seams.is_applied()
    assert schedules.get_forward_backward_func is stock_function
    assert trainer.get_forward_backward_func is stock_function


def test_a_moved_seam_is_refused_whole(unpatched, monkeypatch):
    def backward_step(input_tensor, output_tensor): ...

    monkeypatch.setattr(schedules, "backward_step", backward_step)
    before = schedules.get_forward_backward_func
    with pytest.raises(seams.SeamError, match=r"backward_step takes \(input_tensor, output_tensor\) where"):
        seams.apply()
    assert not seams.is_applied()
    assert schedules.get_forward_backward_func is before


def test_a_missing_seam_is_refused_whole(unpatched, monkeypatch):
    monkeypatch.delattr(schedules, "backward_step")
    with pytest.raises(seams.SeamError, match="backward_step is not there"):
        seams.apply()
    assert not seams.is_applied()


def test_a_wrapper_that_fails_leaves_nothing_behind(unpatched):
    def fail(target):
        raise RuntimeError("on purpose")

    first, second = seams.all_seams()[:2]
    broken = seams.Seam(second.module, second.name, second.parameters, fail, "")
    before = trainer.get_forward_backward_func
    with pytest.raises(RuntimeError, match="on purpose"):
        seams.apply((first, broken))
    assert not seams.is_applied()
    assert trainer.get_forward_backward_func is before


@pytest.mark.parametrize("flags", [(), ("--num-virtual-stages-per-pipeline-rank", "2")])
def test_without_our_flag_megatron_is_stock(unpatched, flags):
    pipeline = ("--pipeline-model-parallel-size", "2", *flags)
    truly_stock = run(2, pipeline)
    seams.apply()
    assert_same_bits(run(2, pipeline), truly_stock)
