"""Checkpoints under every kind of schedule, with a distributed optimizer, and written in the background.

Gradients are in several buckets throughout.

``test_crossing`` has the plain case: torch_dist, one data-parallel rank, from one placement to another.
"""

import functools
import time
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.integration.mends import bucket_padding
from megatron_pp_ext.integration.trainer import checkpoint_loading
from megatron_pp_ext.schedule import csv_file
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement, Shape
from tests.support import rounding
from tests.support.ranks import RankError
from tests.support.training import train

BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
"""Several on every rank, as real models have; not all of them fill what Megatron pads them to."""
STEPS = ("--ckpt-format", "torch_dist", "--train-iters", "4", *BUCKETS)
PP2 = ("--pipeline-model-parallel-size", "2")
PP4 = ("--pipeline-model-parallel-size", "4")
TP2 = ("--tensor-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer",)
RESHARDABLE = (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")
PLACEMENTS = {
    "v": ("--pipeline-schedule", "v-half"),
    "loop": ("--num-virtual-stages-per-pipeline-rank", "2"),
    "line": (),
}


def losses(world: int, *flags: str) -> list[float]:
    return train(world, [*STEPS, *flags])[-1].losses


def save(folder: Path, world: int, *flags: str) -> list[float]:
    """Four steps with a checkpoint in the middle; all four losses."""
    return losses(world, *flags, "--save", str(folder), "--save-interval", "2")


def resume(folder: Path, world: int, *flags: str) -> list[float]:
    """The last two steps again, from the checkpoint in the middle."""
    return losses(world, *flags, "--load", str(folder), "--ckpt-step", "2")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half", "v-zb", "interleaved", "flex"])
def test_a_run_goes_on_where_it_was(schedule: str, tmp_path: Path) -> None:
    flags = (*PP2, "--pipeline-schedule", schedule)
    if schedule == "flex":
        flags += ("--pipeline-memory-limit", "0.8")
    run = save(tmp_path, 2, *flags)
    assert resume(tmp_path, 2, *flags) == run[2:]


class Saved:
    """A checkpoint of each placement, PP 2 x DP 2 with a distributed optimizer, made when first asked for."""

    def __init__(self, factory: pytest.TempPathFactory, *flags: str) -> None:
        self._factory, self._flags = factory, flags
        self._made: dict[str, tuple[Path, list[float]]] = {}

    def by(self, placement: str) -> tuple[Path, list[float]]:
        """The folder, and the losses of all four steps."""
        if placement not in self._made:
            folder = self._factory.mktemp(placement)
            run = save(folder, 4, *PP2, *self._flags, *PLACEMENTS[placement])
            self._made[placement] = folder, run
        return self._made[placement]


@pytest.fixture(scope="module")
def reshardable(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory, *RESHARDABLE)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Without --dist-ckpt-optim-fully-reshardable, as Megatron saves a distributed optimizer by default."""
    return Saved(tmp_path_factory, *DISTRIBUTED)


@pytest.mark.parametrize(("writer", "reader"), [("v", "line"), ("v", "loop"), ("line", "v"), ("loop", "v")])
def test_distributed_optimizer_state_crosses_over(reshardable: Saved, writer: str, reader: str) -> None:
    """The embeddings are tied: under a V one rank holds both copies and the state of both."""
    folder, run = reshardable.by(writer)
    assert resume(folder, 4, *PP2, *RESHARDABLE, *PLACEMENTS[reader]) == run[2:]


@pytest.mark.parametrize(
    ("world", "reader"),
    [(4, (*PP4, "--pipeline-schedule", "zb-h1")), (2, (*PP2, *PLACEMENTS["loop"])), (4, PLACEMENTS["line"])],
    ids=["pp4-dp1", "pp2-dp1", "pp1-dp4"],
)
def test_pipeline_and_data_sizes_change_together(reshardable: Saved, world: int, reader) -> None:
    """Two replicas wrote; one or four add up the same gradients in another order."""
    folder, run = reshardable.by("v")
    resumed = resume(folder, world, *RESHARDABLE, *reader)
    assert resumed == pytest.approx(run[2:], rel=rounding.of_losses(updates=1))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((), ("--ddp-bucket-size", "5000")),
        (("--ddp-num-buckets", "3"), ()),
        (("--distrib-optim-fully-reshardable-mem-efficient",), ()),
    ],
    ids=["other-buckets", "number-of-buckets", "mem-efficient"],
)
def test_state_is_independent_of_buckets(writer, reader, tmp_path: Path) -> None:
    flags = ("--train-iters", "4", "--ckpt-format", "torch_dist", "--overlap-grad-reduce", *PP2, *RESHARDABLE)
    run = train(4, [*flags, *writer, "--save", str(tmp_path), "--save-interval", "2"])[-1].losses
    assert train(4, [*flags, *reader, "--load", str(tmp_path), "--ckpt-step", "2"])[-1].losses == run[2:]


def test_a_tied_embedding_is_a_bucket_of_its_own(tmp_path: Path) -> None:
    """Without a flag for buckets; 65 rows of 32 numbers are no multiple of 128."""
    flags = ("--train-iters", "4", "--ckpt-format", "torch_dist", "--vocab-size", "65", *PP2, *RESHARDABLE)
    run = train(4, [*flags, "--save", str(tmp_path), "--save-interval", "2"])[-1].losses
    assert train(4, [*flags, "--load", str(tmp_path), "--ckpt-step", "2"])[-1].losses == run[2:]


def test_a_mended_megatron_is_left_as_it_is() -> None:
    def mended(self, model_sharded_state_dict, is_loading=False, metadata=None):
        return [bucket.numel_unpadded for buffer in self.buffers for bucket in buffer.buckets]

    assert bucket_padding.count_without_padding(mended) is mended


def test_fixed_state_goes_on_with_fewer_replicas(fixed: Saved) -> None:
    folder, run = fixed.by("v")
    resumed = resume(folder, 2, *PP2, *DISTRIBUTED, *PLACEMENTS["v"])
    assert resumed == pytest.approx(run[2:], rel=rounding.of_losses(updates=1))


def test_fixed_state_goes_on_where_it_was(fixed: Saved) -> None:
    folder, run = fixed.by("v")
    assert resume(folder, 4, *PP2, *DISTRIBUTED, *PLACEMENTS["v"]) == run[2:]


def test_fixed_state_is_refused_elsewhere(fixed: Saved) -> None:
    folder, run = fixed.by("v")
    elsewhere = (*PP2, *DISTRIBUTED, *PLACEMENTS["line"])
    with pytest.raises(RankError, match=r"SystemExit: megatron_pp_ext: .* keeps state rank by rank, for v "):
        resume(folder, 4, *elsewhere)
    # The weights alone are named by layer; the first loss tells that they arrived.
    assert resume(folder, 4, *elsewhere, "--no-load-optim")[0] == run[2]


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


def test_a_checkpoint_by_rank_is_refused_elsewhere(tmp_path: Path) -> None:
    flags = (*PP2, *DISTRIBUTED, "--ckpt-format", "torch")
    run = losses(4, *flags, *PLACEMENTS["v"], "--save", str(tmp_path), "--save-interval", "3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")  # beside the one at the end
    assert losses(4, *flags, *PLACEMENTS["v"], "--load", str(tmp_path)) == run[3:]
    with pytest.raises(RankError, match="go on with the old placement, or save with --ckpt-format"):
        losses(4, *flags, *PLACEMENTS["loop"], "--load", str(tmp_path))


def test_tied_weights_keep_their_own_moments(tmp_path: Path) -> None:
    """Loaded in parallel both copies get one tensor; Adam would then move its moments twice a step."""
    flags = (*PP2, *PLACEMENTS["v"])
    run = save(tmp_path, 4, *flags)
    assert resume(tmp_path, 4, *flags, "--ckpt-fully-parallel-load") == run[2:]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((*TP2, *PP2, *PLACEMENTS["v"]), PP4),
        ((*TP2, *PP2), (*PP4, *PLACEMENTS["v"])),
        ((*PP4, *PLACEMENTS["v"]), (*TP2, *PP2, *PLACEMENTS["v"])),
    ],
    ids=["v-to-line", "line-to-v", "v-to-v"],
)
def test_tensor_and_pipeline_sizes_change_together(writer, reader, tmp_path: Path) -> None:
    run = save(tmp_path, 4, *writer, *RESHARDABLE)
    assert resume(tmp_path, 4, *reader, *RESHARDABLE) == pytest.approx(
        run[2:], rel=rounding.of_losses(updates=1)
    )


def test_saving_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint holds the step at which it was asked for, however late it is written."""
    write = FileSystemWriterAsync.write_preloaded_data_multithread

    @functools.wraps(write)
    def late(*args: object) -> None:
        time.sleep(1)
        write(*args)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data_multithread", staticmethod(late))
    flags = (*PP2, *PLACEMENTS["v"])
    run = save(tmp_path, 2, *flags, "--async-save", "--use-persistent-ckpt-worker")
    assert resume(tmp_path, 2, *flags) == run[2:]
