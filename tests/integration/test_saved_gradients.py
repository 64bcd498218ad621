"""The weight gradients that Megatron saves are whole, also where each replica gets a part of their sum."""

import re
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement, linear
from tests.support import training
from tests.support.tiers import first

LAYERS, RANKS, STEPS = 4, 2, 4
JOB = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers {LAYERS} --train-iters {STEPS} --clip-grad 0 "
    "--use-distributed-optimizer --untie-embeddings-and-output-weights"
)
SAVED = (2, 4)
"""Steps: in the first Megatron learns how often each parameter counts, which it expects in the second."""


def saved(folder: Path, placement: Placement, *flags: str) -> dict[tuple[int, str], torch.Tensor]:
    """The gradients of a job of two replicas, by step and global name."""
    where = ("--save", str(folder), "--save-interval", "100", "--save-wgrads-interval", "2")
    training.train(2 * RANKS, [*JOB.split(), *flags, *where])
    found = {}
    for step in SAVED:
        for rank in range(RANKS):
            chunks = torch.load(folder / "wgrads" / f"iter_{step:07}" / f"mp_rank_00_{rank:03}.pth")
            for chunk, gradients in enumerate(chunks.values()):
                first = placement.stage_of(rank, chunk) * LAYERS // placement.stages
                found |= {(step, global_name(name, first)): gradient for name, gradient in gradients.items()}
    return found


def global_name(name: str, first: int) -> str:
    return re.sub(r"layers\.(\d+)", lambda layer: f"layers.{first + int(layer[1])}", name)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    first(1, [("v-half", ()), ("v-zb", ("--overlap-param-gather", "--no-align-grad-reduce"))]),
)
def test_saved_gradients_are_stock_s(schedule: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Stock's own are whole without --overlap-grad-reduce."""
    theirs = saved(tmp_path / "stock", linear(RANKS))
    placement = catalog.build(schedule, RANKS, 8).placement
    overlap = ("--pipeline-schedule", schedule, "--overlap-grad-reduce", *flags)
    ours = saved(tmp_path / "ours", placement, *overlap)
    assert ours.keys() == theirs.keys()
    assert [name for name, gradient in ours.items() if not torch.equal(gradient, theirs[name])] == []
