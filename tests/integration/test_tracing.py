"""When a step is recorded and what its trace holds, without a job."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners import tracing
from megatron_pp_ext.megatron.runners.tracing import Counting
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule.actions import Action, Kind

STOCK = named("1f1b", 2, 4)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The microbatches of the actions in every trace that is written."""
    files: list[list[int]] = []
    monkeypatch.setattr(tracing, "_recorder", None)
    monkeypatch.setattr(tracing, "is_first_pipeline", lambda group: True)
    monkeypatch.setattr(tracing, "reporting_to", lambda recorder, model: nullcontext())
    monkeypatch.setattr(tracing, "aligned", lambda record, group, device: record)
    monkeypatch.setattr(tracing, "gather", lambda record, group: [record])

    def write(path, name, placement, records) -> None:
        files.append([event.action.microbatch for event in records[0].events])

    monkeypatch.setattr(tracing.trace_file, "write", write)
    yield files
    requested.activate(None)


def step(number: int, forward_only: bool = False, **about) -> bool | None:
    """Run one action; whether its bytes are counted, None where it is not recorded."""
    with tracing.recording(None, [], forward_only, **about) as recorder:
        if recorder is None:
            return None
        with recorder.during(Action(0, Kind.F, number)):
            kept = torch.ones(3, requires_grad=True).square()
        is_counted = STORE.meter is not None
        assert bool(recorder.meter.live_bytes) == is_counted
        del kept
        return is_counted


def test_a_trace_holds_the_last_step(written: list[list[int]], tmp_path: Path) -> None:
    """Several updates are written once."""
    requested.activate(requested.Pipeline(STOCK, trace=tmp_path / "trace.json"))
    assert [step(0), step(1), step(2, forward_only=True)] == [True, True, None]
    assert written == [[0], [1]]
    for number in range(5):
        step(number, part=number % 3, parts=3)
    assert written == [[0], [1], [0, 1, 2]]


def test_bytes_are_counted_where_somebody_wants_them(written: list[list[int]], tmp_path: Path) -> None:
    """Counting takes time; a run that compares seconds must not pay for it."""
    requested.activate(requested.Pipeline(STOCK))
    assert step(0) is None
    assert step(0, counting=Counting.BYTES) is True
    assert step(0, counting=Counting.SECONDS) is False
    assert step(0, forward_only=True, counting=Counting.BYTES) is None
    requested.activate(requested.Pipeline(STOCK, trace=tmp_path / "trace.json"))
    assert step(0, counting=Counting.SECONDS) is True
    assert written == [[0]]
