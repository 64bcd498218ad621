"""Checkpoints whose state goes by rank, those of the older format, and those written in the background.

Gradients are in several buckets throughout.  ``test_crossing`` has all that goes on elsewhere.
"""

import functools
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.training.checkpointing import CheckpointType

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.megatron import workarounds
from megatron_pp_ext.megatron.core.embedding_copies import separate_copies
from megatron_pp_ext.megatron.trainer import checkpoint_loading
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Placement, Shape
from tests.support import rounding
from tests.support.ranks import RankError
from tests.support.training import train
from tests.support.wrapped import KINDS, Wrapped, wrapped

BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
"""Several on every rank, as real models have; not all of them fill what Megatron pads them to."""
STEPS_OF_FEATURES = ("--ckpt-format", "torch_dist", "--train-iters", "4", *BUCKETS)
STEPS_OF_FEATURES += ("--num-layers", "4", "--global-batch-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer",)
V_HALF = ("--pipeline-schedule", "v-half")


def losses(world: int, *flags: str) -> list[float]:
    return train(world, [*STEPS_OF_FEATURES, *flags])[-1].losses


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
    flags = (*PP2, *DISTRIBUTED_OPTIMIZER)
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
    flags = (*PP2, *DISTRIBUTED_OPTIMIZER, "--num-layers", "6")
    loop = (*flags, "--num-virtual-stages-per-pipeline-rank", "3")
    run = save(tmp_path, 2, *flags, "--pipeline-schedule", f"csv:{tmp_path / 'wave.csv'}")
    assert run == losses(2, *loop)
    with pytest.raises(RankError, match=r"for wave placement .* but this run has loop placement"):
        resume(tmp_path, 2, *loop)
    # Without the refusal it would load, and train on wrongly.
    monkeypatch.setattr(checkpoint_loading, "_fix_if_rank_by_rank", lambda *state: None)
    assert resume(tmp_path, 2, *loop) != run[2:]


@pytest.mark.wide
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


V = "v placement with 2 chunk(s) on each of 2 ranks"
STOCK = {"pipeline_placement": None, "pipeline_model_parallel_size": 2}
LINE = Namespace(**STOCK, virtual_pipeline_model_parallel_size=None)
LOOP = Namespace(**STOCK, virtual_pipeline_model_parallel_size=2)
MIRRORED = Namespace(**{**STOCK, "pipeline_placement": V}, virtual_pipeline_model_parallel_size=2)


NEEDS = {"use_distributed_optimizer": True, "no_load_optim": False, "finetune": False}


def refused(
    saved: Namespace, now: Namespace, kind: object = None, sharding: str | None = "dp", **flags
) -> bool:
    """Whether a run with the placement of ``now`` refuses a checkpoint of ``saved``."""
    state = {"args": saved, "content_metadata": {"distrib_optim_sharding_type": sharding}}
    run = Namespace(**vars(now), **{**NEEDS, **flags})
    try:
        checkpoint_loading._refuse_other_placement("folder", state, kind, run)
    except SystemExit as end:
        assert "keeps state rank by rank" in str(end) and "\n" not in str(end)
        return True
    return False


def test_who_needs_state_that_goes_by_rank() -> None:
    by_rank = "dp_zero_gather_scatter"
    assert refused(MIRRORED, LINE, sharding=by_rank)
    assert not refused(MIRRORED, MIRRORED, sharding=by_rank)
    # A fine-tuning starts a new optimizer, whatever the checkpoint has.
    for flag in ("finetune", "no_load_optim"):
        assert not refused(MIRRORED, LINE, sharding=by_rank, **{flag: True})
    assert not refused(MIRRORED, LINE, sharding=by_rank, use_distributed_optimizer=False)
    assert not refused(MIRRORED, LINE, sharding="fully_reshardable")
    assert not refused(MIRRORED, LINE, sharding=None)
    # Files of each rank are of no use elsewhere, fine-tuning or not.
    for finetune in (False, True):
        assert refused(MIRRORED, LINE, kind=CheckpointType.LEGACY, sharding=None, finetune=finetune)


@pytest.mark.parametrize(
    ("saved", "now"), [(MIRRORED, LINE), (LINE, MIRRORED), (MIRRORED, LOOP), (LOOP, MIRRORED)]
)
def test_either_side_may_have_another_placement(saved: Namespace, now: Namespace) -> None:
    assert refused(saved, now, sharding="dp_zero_gather_scatter")


def test_what_stock_saved_for_stock_is_stocks_own_affair() -> None:
    assert not refused(LINE, LOOP, sharding="dp_zero_gather_scatter")


def test_a_schedule_of_ours_with_stocks_placement_goes_on_with_stocks_state() -> None:
    loop = Namespace(**vars(LOOP))
    loop.pipeline_placement = "loop placement with 2 chunk(s) on each of 2 ranks"
    assert not refused(LOOP, loop) and not refused(loop, LOOP)
    line = Namespace(**vars(LINE))
    line.pipeline_placement = "linear placement with 1 chunk(s) on each of 2 ranks"
    assert refused(LINE, loop) and refused(LOOP, line)


BY_RANK, BY_WEIGHT = "dp_reshardable", "fully_reshardable"


@pytest.mark.parametrize(
    ("before", "now", "flags", "sharding", "fix"),
    [
        (1, 2, {}, BY_WEIGHT, "go on with 1, or load with --no-load-optim"),
        (2, 1, {}, BY_WEIGHT, "go on with 2, or load with --no-load-optim"),
        (1, 2, {"use_distributed_optimizer": False}, None, "load with --no-load-optim"),
        (2, 4, {}, BY_RANK, "save with --dist-ckpt-optim-fully-reshardable there, or load with --no-load-o"),
        (2, 4, {}, BY_WEIGHT, None),
        (2, 2, {}, BY_RANK, None),
        (1, 2, {"no_load_optim": True}, BY_WEIGHT, None),
    ],
)
def test_experts_on_other_ranks_take_no_optimizer_state_that_does_not_fit(
    before: int, now: int, flags: dict[str, bool], sharding: str | None, fix: str | None
) -> None:
    state = {
        "args": Namespace(expert_model_parallel_size=before),
        "content_metadata": {"distrib_optim_sharding_type": sharding},
    }
    run = Namespace(expert_model_parallel_size=now, **{**NEEDS, **flags})

    def check(kind: object) -> None:
        checkpoint_loading._refuse_other_experts("folder", state, kind, run)

    if fix is None:
        check(CheckpointType.GLOBAL)
    else:
        with pytest.raises(SystemExit, match=f"were on {before} rank.s., .*-size {now}; .*{fix}"):
            check(CheckpointType.GLOBAL)
    if before != now:
        with pytest.raises(SystemExit, match="save with --ckpt-format torch_dist there"):
            check(CheckpointType.LEGACY)


@pytest.mark.parametrize("is_release", [True, False])
def test_weights_alone_load_with_experts_on_other_ranks(is_release: bool) -> None:
    """As those converted from another library are saved."""
    state = {"args": Namespace(expert_model_parallel_size=1, no_save_optim=False)}
    loaded = (state, "file", is_release, CheckpointType.GLOBAL)
    run = Namespace(
        rank=1, ckpt_format="torch_dist", ckpt_step=None, expert_model_parallel_size=2, **NEEDS, **STOCK
    )
    load = checkpoint_loading.load_placed(lambda *args, **kwargs: loaded)
    if is_release:
        assert load("folder", run, rank0=True) == loaded
    else:
        with pytest.raises(SystemExit, match="folder keeps the state of experts that were on 1 rank"):
            load("folder", run, rank0=True)


STEPS = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --num-experts 4 --disable-bias-linear --train-iters 4"
)
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


@pytest.mark.wide
@pytest.mark.parametrize("file_format", ["torch_dist", "torch"])
def test_experts_go_to_other_ranks_as_the_line_says(file_format: str, tmp_path: Path) -> None:
    """Stock's own jobs fail there with a traceback, or end with a success and without a step."""
    flags = [*f"{STEPS} {DISTRIBUTED} --ckpt-format {file_format}".split(), "--expert-model-parallel-size"]
    train(4, [*flags, "1", "--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"])
    load = [*flags, "2", "--load", str(tmp_path)]
    fix = "load with --no-load-optim" if file_format == "torch_dist" else "save with --ckpt-format torch_dist"
    with pytest.raises(RankError, match=f"SystemExit: megatron_pp_ext: .*{fix}"):
        train(4, load)
    if file_format == "torch_dist":
        assert len(train(4, [*load, "--no-load-optim"])[-1].losses) == 2


def test_each_copy_has_its_own_memory() -> None:
    moment, empty = torch.arange(3.0), torch.zeros(0)
    state = {"first": {"moment": moment, "none": empty}, "last": [{"moment": moment}, {"none": empty}, 7]}
    separate_copies(state)
    first, last = state["first"]["moment"], state["last"][0]["moment"]
    first.add_(1)
    assert first.tolist() == [1.0, 2.0, 3.0] and last.tolist() == [0.0, 1.0, 2.0]
    assert state["last"][2] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tensors_are_no_copies_of_each_other(kind: type[Wrapped]) -> None:
    one, other = wrapped(kind, 2, 3), wrapped(kind, 2, 3)
    state = {"first": one, "second": other, "again": one}
    separate_copies(state)
    assert state["first"] is one and state["second"] is other and state["again"] is not one
