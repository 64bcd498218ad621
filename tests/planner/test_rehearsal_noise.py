"""Rehearsed seconds are believed where the machine was quiet, and refused where it was not."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp_ext import processor
from megatron_pp_ext.planner.rehearsal import described, disturbance, require_quiet
from megatron_pp_ext.processor import ProcessorTime
from megatron_pp_ext.schedule.costs import StageCosts
from megatron_pp_ext.schedule.formats.rehearsal_file import RankRehearsal

QUIET = RankRehearsal(
    rank=1, schedule="1f1b", digest="", layers=(1, 1), stages=(StageCosts(1.0, 1.0, 1.0, 1.0),),
    collectives=(), message_bytes=8, outside_seconds=0.5, peak_activation_bytes=1, weight_bytes=1,
    gradient_bytes=1, optimizer_bytes=1, step_seconds=(2.0, 2.1, 2.0, 2.2), waited=0.01, load=0.5,
)  # fmt: skip


def test_a_quiet_machine_is_believed_and_described() -> None:
    other = replace(QUIET, rank=2, step_seconds=(2.0, 2.0, 2.0, 2.0), waited=0.02, load=0.6)
    require_quiet([QUIET, other])
    assert disturbance([QUIET, other]) is None
    assert described([QUIET, other]) == (
        "timed steps spread most on rank 1, where the middle half of 4 took 2 to 2.125 s; ranks waited for a "
        "processor for up to 2.0% of their time; the machine's load was up to 0.6 a processor"
    )


def test_steps_from_2_to_30_s_are_not_believed() -> None:
    """A 1F1B step of 2 to 6 s was once rehearsed as 29.8 s."""
    uneven = replace(QUIET, step_seconds=(2.0, 6.0, 29.8, 31.0))
    with pytest.raises(
        ValueError, match=r"not to be believed: the middle half of the steps of rank 1 spread"
    ):
        require_quiet([replace(QUIET, rank=0), uneven])


def test_steps_that_are_all_as_slow_are_not_believed_where_they_waited() -> None:
    slow = replace(QUIET, rank=3, step_seconds=(29.8, 29.8), waited=0.8)
    with pytest.raises(ValueError, match=r"rank 3 waited for a processor for 80% of its time, more than 10%"):
        require_quiet([slow])


def test_one_late_step_of_many_does_not_count() -> None:
    require_quiet([replace(QUIET, step_seconds=(2.0,) * 9 + (10.0,))])


@pytest.mark.parametrize("steps", [(), (2.0,)])
def test_a_system_that_tells_nothing(steps: tuple[float, ...]) -> None:
    unknown = replace(QUIET, step_seconds=steps, waited=None, load=None)
    require_quiet([unknown])
    assert described([unknown]) == "too few timed steps to tell how they spread"


def test_waits_are_those_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(processor, "_SCHEDSTAT", file)
    before = ProcessorTime.now()
    assert ProcessorTime.now().waited_since(before) is None
    file.write_text("1000 500 7\n")
    before = ProcessorTime.now()
    file.write_text("4000 1500 9\n")
    assert ProcessorTime.now().waited_since(before) == 0.25


def test_a_system_without_load_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.os, "getloadavg", lambda: (4.0, 1.0, 1.0))
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 8)
    assert processor.load() == 0.5
    monkeypatch.delattr(processor.os, "getloadavg")
    assert processor.load() is None
