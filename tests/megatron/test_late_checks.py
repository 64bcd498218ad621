"""Checks of numbers that are put off: when they are made, and of what."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.optimizer import check_late, put_off

SEEN: list[tuple[str, float, bool]] = []


@check_late
def check(machine: Any, result: Any, rejection_func: Any, message: str, fatal: bool = True) -> None:
    """Stands for Megatron's: notes the message, the number and the verdict."""
    SEEN.append((message, float(result), bool(rejection_func(result))))


@pytest.fixture(autouse=True)
def training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    SEEN.clear()
    pipeline = SimpleNamespace(rehearsal=None)
    monkeypatch.setattr(requested, "require", lambda: pipeline)
    return pipeline


def test_checks_are_made_at_the_end_of_what_they_were_given() -> None:
    """Stock divides a loss in place behind the check, and frees what it has handed on."""
    loss = torch.tensor(torch.nan, requires_grad=True)
    with put_off():
        check(None, loss, torch.isnan, "loss", fatal=False)
        check(None, 2.0, lambda number: number > 1, message="large")
        loss.data.zero_()
        loss.data = torch.zeros(1)
        assert not SEEN
    assert str(SEEN) == "[('loss', nan, True), ('large', 2.0, True)]"
    check(None, loss, torch.isnan, "outside")
    assert SEEN[2:] == [("outside", 0.0, False)]


def test_what_was_put_off_goes_with_a_step_that_fails() -> None:
    with pytest.raises(ValueError, match=r"^a step$"), put_off():
        check(None, torch.tensor(1.0), torch.isnan, "lost")
        raise ValueError("a step")
    check(None, torch.tensor(2.0), torch.isnan, "next")
    assert SEEN == [("next", 2.0, False)]


def test_made_up_numbers_are_accepted(training: SimpleNamespace) -> None:
    training.rehearsal = Path("0.json")
    with put_off():
        check(None, torch.tensor(torch.inf), torch.isinf, "tensor")
        check(None, 2.0, lambda number: number > 1, "number")
    assert [verdict for *_, verdict in SEEN] == [False, False]
