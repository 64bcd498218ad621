"""Checkpoints whose state goes by rank, those of the older format, and those written in the background.

Gradients are in several buckets throughout.  ``test_crossing`` has all that goes on elsewhere.
"""

import functools
import time
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.megatron import workarounds
from megatron_pp_ext.megatron.trainer import checkpoint_loading
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Placement, Shape
from tests.support import rounding
from tests.support.ranks import RankError
from tests.support.training import train

BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
"""Several on every rank, as real models have; not all of them fill what Megatron pads them to."""
STEPS = ("--ckpt-format", "torch_dist", "--train-iters", "4", *BUCKETS)
STEPS += ("--num-layers", "4", "--global-batch-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer",)
V_HALF = ("--pipeline-schedule", "v-half")


def losses(world: int, *flags: str) -> list[float]:
    return train(world, [*STEPS, *flags])[-1].losses


def save(folder: Path, world: int, *flags: str) -> list[float]:
    """Four steps with a checkpoint in the middle; all four losses."""
    return losses(world, *flags, "--save", str(folder), "--save-interval", "2")


def resume(folder: Path, world: int, *flags: str) -> list[float]:
    """The last two steps again, from the checkpoint in the middle."""
    return losses(world, *flags, "--load", str(folder), "--ckpt-step", "2")


def test_a_corrected_megatron_is_left_as_it_is() -> None:
    def corrected(self, model_sharded_state_dict, is_loading=False, metadata=None):
        return [bucket.numel_unpadded for buffer in self.buffers for bucket in buffer.buckets]

    assert workarounds.count_without_padding(corrected) is corrected


def test_state_that_goes_by_rank(tmp_path: Path) -> None:
    """As Megatron saves a distributed optimizer by default: for fewer replicas, for no other placement."""
    flags = (*PP2, *DISTRIBUTED)
    run = save(tmp_path, 4, *flags, *V_HALF)
    resumed = resume(tmp_path, 2, *flags, *V_HALF)
    assert resumed == pytest.approx(run[2:], rel=rounding.of_losses(updates=1))
    with pytest.raises(RankError, match=r"SystemExit: megatron_pp_ext: .* keeps state rank by rank, for v "):
        resume(tmp_path, 2, *flags)
    # The weights alone are named by layer; the first loss tells that they arrived.
    assert resume(tmp_path, 4, *flags, "--no-load-optim")[0] == run[2]


@pytest.mark.wide
def test_state_that_would_fit_is_refused_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave and a loop of three chunks: the sizes agree on every rank, the layers do not."""
    placement = Placement(Shape.WAVE, 2, 3)
    wave = compile_schedule(2, 8, Costs.unit(placement), 100, placements=[placement])
    csv_file.write(wave.timeline.schedule, tmp_path / "wave.csv")
    flags = (*PP2, *DISTRIBUTED, "--num-layers", "6")
    loop = (*flags, "--num-virtual-stages-per-pipeline-rank", "3")
    run = save(tmp_path, 2, *flags, "--pipeline-schedule", f"csv:{tmp_path / 'wave.csv'}")
    assert run == losses(2, *loop)
    with pytest.raises(RankError, match=r"for wave placement .* but this run has loop placement"):
        resume(tmp_path, 2, *loop)
    # Without the refusal it would load, and train on wrongly.
    monkeypatch.setattr(checkpoint_loading, "_fix_if_rank_by_rank", lambda *state: None)
    assert resume(tmp_path, 2, *loop) != run[2:]


def test_saving_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint holds the step at which it was asked for, however late it is written.

    Megatron saves the third step when training is over, by a process that it starts for this.
    """
    write = FileSystemWriterAsync.write_preloaded_data_multithread

    @functools.wraps(write)
    def late(*args: object) -> None:
        time.sleep(1)
        write(*args)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(late))
    flags = (*PP2, *V_HALF, "--train-iters", "3")
    run = save(tmp_path, 2, *flags, "--async-save", "--use-persistent-ckpt-worker")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert resume(tmp_path, 2, *flags) == run[2:]
