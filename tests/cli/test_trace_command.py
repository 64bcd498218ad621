"""`mpp trace`: what ran, and where idle time came from."""

import pytest

from megatron_pp_ext.cli import report
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, Reduction
from megatron_pp_ext.schedule.simulate import simulate


def recorded(path, ranks=2, microbatches=3, seconds=1.0):
    schedule = catalog.build("1f1b", ranks, microbatches)
    each = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), seconds)
    unit = Costs.uniform(schedule.placement, **each, hop=0.5 * seconds)
    records = [
        RankRecord(
            tuple(Measured(*event, 0, processor_seconds=seconds) for event in row),
            900 * 10**9,
            2,
            (Reduction(0, row[-1].end - seconds, row[-1].end + 2 * seconds),),
            clock_error=1e-5 * rank,
            device_bytes=2000 * 10**9 + rank,
        )
        for rank, row in enumerate(simulate(schedule, unit).events)
    ]
    trace_file.write(path, "1f1b", schedule.placement, records)
    return path


@pytest.fixture
def trace(tmp_path):
    return recorded(tmp_path / "step.json")


def rows_of(output):
    """The rows of numbers of every table, in order; the first of each is a rank."""
    cells = (
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line
    )
    return [row for row in cells if row[0].isdigit()]


def test_idle_time_by_cause(trace, mpp):
    output = mpp("trace", trace).output
    assert "step: 1f1b: a step of 16,000.00 ms" in output
    idle, waits, memory = (rows_of(output)[at : at + 2] for at in (0, 2, 4))
    # Idle time that is neither before, between nor after a rank's actions was spent reducing gradients.
    assert idle[0] == ["0", "7,000.00", "43.8%", "0.00", "5,000.00", "0.00", "2,000.00"]
    assert idle[1] == ["1", "7,000.00", "43.8%", "1,500.00", "1,000.00", "2,500.00", "2,000.00"]
    assert waits[0] == ["0", "5,000.00", "4,000.00", "1,000.00", "0.00", "0.00"]
    assert waits[1] == ["1", "1,000.00", "500.00", "500.00", "0.00", "0.01"]
    assert memory[1] == ["1", "900,000,000,000", "2,000,000,000,001"]


def test_eighty_columns_cut_nothing(tmp_path, mpp, monkeypatch):
    monkeypatch.setattr(report.console, "width", 80)
    path = recorded(tmp_path / "a_recorded_step_of_the_second_run.json", ranks=8, microbatches=16)
    lines = mpp("trace", path).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert len(rows_of("\n".join(lines))) == 3 * 8


def test_simulated_steps_open_in_their_own_unit(tmp_path, mpp):
    """V-Half at p = 4, m = 8 takes 26.5, of which a rank is idle for 2.5, and keeps three microbatches."""
    path = tmp_path / "a.json"
    assert mpp("schedule", "v-half", "--trace", path).exit_code == 0
    output = mpp("trace", path).output
    assert "a: v-half: a step of 26.50, idle time" in output
    assert "times: 1 = a rank's F, I or W of one microbatch" in output
    assert "live activations,\n" not in output
    idle, waits, memory = (rows_of(output)[at : at + 4] for at in (0, 4, 8))
    assert [row[1] for row in idle] == ["2.50"] * 4
    assert {row[3] for row in waits} == {"0.00"}
    assert [row[1] for row in memory] == ["3"] * 4


def test_a_rehearsed_step_opens_in_seconds(tmp_path, mpp):
    """What mpp rehearse writes: a simulated step with measured seconds and bytes."""
    schedule = catalog.build("v-half", 2, 4)
    costs = Costs((StageCosts(0.02, 0.02, 0.01, activation=3e9),) * 4, hop=0.001)
    trace_file.write_timeline(tmp_path / "a.json", simulate(schedule, costs))
    output = mpp("trace", tmp_path / "a.json").output
    assert "times: seconds" in output
    assert " ms, idle time" in output
    assert rows_of(output)[-1] == ["1", "12,000,000,000"]


def test_traces_in_different_units_are_not_mixed(trace, tmp_path, mpp):
    mpp("schedule", "v-half", "--trace", tmp_path / "a.json")
    refused = mpp("trace", trace, tmp_path / "a.json")
    assert refused.exit_code == 2
    assert "look at them one by one" in refused.stderr


def test_files_of_one_name_are_told_apart(trace, tmp_path, mpp):
    other = tmp_path / "other" / "step.json"
    other.parent.mkdir()
    other.write_text(trace.read_text())
    output = mpp("trace", trace, other).output
    assert output.count("a step of 16,000.00 ms") == 2


def test_with_a_core_for_every_rank(trace, mpp):
    """Every action takes 1 s and messages none: each rank does 6, and each end of the pipeline adds 1."""
    output = mpp("trace", trace, "--processor-time").output
    assert "1f1b, replayed: a step of 8,000.00 ms" in output
