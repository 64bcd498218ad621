"""What a run writes down for ``mpp verify``, beside a step that only has results."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.megatron.trainer import reports
from megatron_pp_ext.schedule.formats import run_record


class Optimizer:
    steps = 0

    def step(self) -> None:
        self.steps += 1


def test_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Losses and norms of every step; the gradients of the first alone, before the optimizer uses them."""
    optimizer, written = Optimizer(), []
    given = SimpleNamespace(verify_pipeline=tmp_path, verify_pipeline_gradients=True)
    monkeypatch.setattr(reports, "get_args", lambda: given)
    monkeypatch.setattr(reports.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        reports, "_write_gradients", lambda folder, model: written.append((folder, optimizer.steps))
    )
    norms = [0.5, None, 0.25]

    def train_step(
        forward_step_func, data_iterator, model, optimizer, scheduler, config, function, iteration
    ):
        optimizer.step()
        losses = {"lm loss": torch.tensor(4.0 - iteration), "mtp loss": torch.tensor(1.0)}
        return losses, 0, False, False, 0, norms[iteration], 7

    step = reports.record_step(train_step)
    for iteration in range(3):
        assert step(None, None, [], optimizer, None, None, None, iteration)[-1] == 7
    assert written == [(tmp_path, 0)] and optimizer.steps == 3
    record = run_record.read(tmp_path, 3)
    assert [dict(losses) for losses in record.losses] == [
        {"lm loss": 4.0 - iteration, "mtp loss": 1.0} for iteration in range(3)
    ]
    assert record.norms == (0.5, None, 0.25)
