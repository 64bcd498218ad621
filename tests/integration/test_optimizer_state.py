"""The moments that Megatron's optimizers hold for the tiny GPT against those that are counted."""

import gc
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.optimizers import moment_bytes
from megatron_pp_ext.job.typed_job import Job
from tests.support.flags import arguments
from tests.support.tiers import first
from tests.support.training import train

FLAGS = "--untie-embeddings-and-output-weights --optimizer"


@pytest.mark.parametrize("optimizer", first(1, ["muon", "sgd", "muon --muon-scalar-optimizer lion"]))
def test_moments_are_those_that_are_counted(optimizer: str, tmp_path: Path) -> None:
    flags = f"{FLAGS} {optimizer}"
    held = tmp_path / "held"

    def write(chunks: list[torch.nn.Module]) -> None:
        sizes = (
            value.nbytes
            for one in gc.get_objects()
            if isinstance(one, torch.optim.Optimizer)
            for state in one.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        held.write_text(str(sum(sizes)))

    train(1, [*flags.split(), "--train-iters", "2"], disturb=write)
    job = Job.of(arguments(flags))
    model = model_parts(job)
    whole = sum(model.layers, model.table + model.positions + model.last_norm + model.output)
    matrices = whole.matrices.parameters if whole.matrices else 0.0
    moments = moment_bytes(job.memory, matrices / whole.parameters) * whole.parameters
    assert int(held.read_text()) == pytest.approx(moments)
