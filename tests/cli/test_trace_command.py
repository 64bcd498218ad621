"""`mpp trace`: what ran, and where idle time came from."""

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, Reduction
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.view import trace_file


@pytest.fixture
def trace(tmp_path):
    schedule = catalog.build("1f1b", 2, 3)
    unit = Costs.uniform(schedule.placement, forward=1, input_gradient=1, weight_gradient=1, hop=0.5)
    records = [
        RankRecord(
            tuple(Measured(*event, 0) for event in row),
            900,
            2,
            (Reduction(0, row[-1].end - 1, row[-1].end + 2),),
            clock_error=1e-5 * rank,
            device_bytes=2000 + rank,
        )
        for rank, row in enumerate(simulate(schedule, unit).events)
    ]
    trace_file.write(tmp_path / "step.json", "1f1b", schedule.placement, records)
    return tmp_path / "step.json"


def test_idle_time_by_cause(trace, mpp):
    output = mpp("trace", trace).output
    assert "1f1b: a step of 16,000.00 ms" in output
    rows = [line.strip("│").split("│") for line in output.splitlines() if line.startswith("│")]
    causes = "warm-up cool-down unfinished late reductions overhead clock"
    first, second = (dict(zip(causes.split(), map(float, row[3:]), strict=True)) for row in rows[-2:])
    assert [cell.strip() for cell in rows[-2][:3]] == ["0", "7000.00", "43.8%"]
    assert first == dict(zip(causes.split(), (0, 0, 4000, 1000, 2000, 0, 0), strict=True))
    assert second == dict(zip(causes.split(), (1500, 2500, 500, 500, 2000, 0, 0.01), strict=True))


def test_files_of_one_name_are_told_apart(trace, tmp_path, mpp):
    other = tmp_path / "other" / "step.json"
    other.parent.mkdir()
    other.write_text(trace.read_text())
    output = mpp("trace", trace, other).output
    assert output.count("a step of 16,000.00 ms") == 2


def test_clock_errors_are_in_the_file(trace):
    assert [record.clock_error for record in trace_file.read(trace).records] == [0, 1e-5]


def test_what_devices_held(trace, mpp):
    assert [record.device_bytes for record in trace_file.read(trace).records] == [2000, 2001]
    assert "2,000  2,001" in mpp("trace", trace).output
