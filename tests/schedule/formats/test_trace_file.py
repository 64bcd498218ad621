import functools
import gzip
import json
import math
from dataclasses import replace

import pytest

from megatron_pp_ext.features.offload.copies import with_share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Label, Span
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import trace_file
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, Reduction, UnitNames
from megatron_pp_ext.schedule.simulate import simulate


@pytest.fixture
def timeline():
    schedule = catalog.build("v-half", 3, 5)
    stages = tuple(StageCosts(1 + s, 2, 0.5, activation=10 + s) for s in range(6))
    return simulate(schedule, Costs(stages, hop=0.25))


@pytest.fixture
def events(timeline, tmp_path):
    path = tmp_path / "deep" / "trace.json"
    trace_file.write_timeline(path, timeline)
    return json.loads(path.read_text())["traceEvents"]


def of(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_action_has_its_time(events, timeline):
    seen = {(e["pid"], e["name"]): (e["ts"] / 1e6, e["dur"] / 1e6) for e in of(events, "X")}
    expected = {
        (rank, str(action)): (start, end - start)
        for rank, row in enumerate(timeline.events)
        for action, start, end in row
    }
    assert seen == expected


def test_the_counter_is_the_memory_curve(events, timeline):
    for rank in range(3):
        seen = [(e["ts"] / 1e6, e["args"]["live"]) for e in of(events, "C") if e["pid"] == rank]
        assert seen == list(timeline.memory(rank))


def test_a_flow_joins_every_message_to_its_two_actions(events):
    """Each microbatch takes 2 x 2 hops down and 2 x 2 hops up; the turns stay on their rank."""
    starts, ends = ({e["id"]: e for e in of(events, phase)} for phase in "sf")
    assert len(starts) == len(ends) == 5 * 8
    assert starts.keys() == ends.keys()

    def action_at(event):
        inside = [
            x
            for x in of(events, "X")
            if x["pid"] == event["pid"] and x["ts"] <= event["ts"] < x["ts"] + x["dur"]
        ]
        assert len(inside) == 1
        assert inside[0]["tid"] == event["tid"]
        return inside[0]["args"]

    for number, start in starts.items():
        sends, receives = action_at(start), action_at(ends[number])
        assert start["pid"] != ends[number]["pid"]
        assert sends["microbatch"] == receives["microbatch"]
        assert sends["kind"] == receives["kind"]
        assert receives["stage"] - sends["stage"] == (1 if sends["kind"] == "F" else -1)


def test_recorded_steps_have_flows_too_and_are_read_back(timeline, tmp_path):
    records = [
        RankRecord(
            tuple(Measured(action, 7 + start, 7 + end, 100 * rank, 0.25) for action, start, end in row),
            900,
            3,
        )
        for rank, row in enumerate(timeline.events)
    ]
    path = tmp_path / "trace.json"
    trace_file.write(path, "v-half", timeline.schedule.placement, records)
    step = trace_file.read(path)
    again = step.timeline()
    assert again.schedule == replace(timeline.schedule, name=step.name)
    assert [e.start for e in again.events[1]] == pytest.approx([e.start for e in timeline.events[1]])
    assert [record.peak_bytes for record in step.records] == [900] * 3
    assert step.records[2].events[0].live_bytes == 200
    assert {event.processor_seconds for record in step.records for event in record.events} == {0.25}
    assert len(of(json.loads(path.read_text())["traceEvents"], "s")) == 5 * 8


def test_a_whole_backward_sends_its_gradient(tmp_path):
    schedule = catalog.build("1f1b", 2, 1)
    trace_file.write_timeline(tmp_path / "a.json", simulate(schedule, Costs.unit(schedule.placement)))
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert [e["name"] for e in of(events, "X")] == [
        str(Action(s, k, 0)) for s in (0, 1) for k in Kind if k in "FB"
    ]
    assert sorted((e["pid"], round(e["ts"])) for e in of(events, "s")) == [(0, 1_000_000), (1, 4_000_000)]


def test_simulated_steps_are_read_back(timeline, tmp_path):
    units = UnitNames("weeks", "crates")
    trace_file.write_timeline(tmp_path / "a.json", timeline, units)
    step = trace_file.read(tmp_path / "a.json")
    assert step.units == units
    assert step.timeline().schedule == timeline.schedule
    assert step.timeline().makespan == pytest.approx(timeline.makespan)
    assert [record.peak_bytes for record in step.records] == list(timeline.peak_activations)
    assert step.records[0].events[0].live_bytes == timeline.costs.stages[0].activation
    # Rank 0 holds stages 0 and 5; two and more microbatches of them are alive together.
    assert step.records[0].peak_microbatches == 4


def test_copies_have_tracks_of_their_own_and_are_read_back(tmp_path):
    schedule = catalog.build("v-half", 2, 4)
    timeline = with_share(schedule, Costs.per_rank(2, 2).copied_at(0.5), 1.0)
    trace_file.write_timeline(tmp_path / "trace.json", timeline)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in found if event.get("cat") == "copy"]
    assert len(copies) == 2 * sum(map(len, timeline.copies)) > 0
    assert all(event["dur"] == pytest.approx(0.25e6) and event["tid"] >= 2 for event in copies)
    names = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names == {"actions", "copies to the host", "copies from the host"}
    step = trace_file.read(tmp_path / "trace.json")
    assert step.timeline().makespan == pytest.approx(timeline.makespan)
    for record, row in zip(step.records, timeline.copies, strict=True):
        about = [(dict(label.about), times) for label, *times in record.spans]
        there = {(one["stage"], one["microbatch"]): times for one, times in about if one["way"] == "out"}
        assert there == {copied[:2]: pytest.approx(copied.out) for copied in row}
        assert len(record.spans) == 2 * len(row)
    trace_file.write(tmp_path / "again.json", step.name, step.placement, step.records)
    again = trace_file.read(tmp_path / "again.json").records
    assert [_labels(record) for record in again] == [_labels(record) for record in step.records]


def _labels(record: RankRecord) -> list[Label]:
    return [span.label for span in record.spans]


def test_spans_without_a_track_stand_with_the_actions_and_are_read_back(timeline, tmp_path):
    trace_file.write_timeline(tmp_path / "trace.json", timeline)
    step = trace_file.read(tmp_path / "trace.json")
    spans = (Span(Label("exchange", "dispatch"), 1.0, 4.0), Span(Label("exchange", "combine"), 2.0, 3.0))
    records = [step.records[0]._replace(spans=spans), *step.records[1:]]
    trace_file.write(tmp_path / "again.json", step.name, step.placement, records)
    events = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    shown = [(event["ph"], event["name"]) for event in events if event.get("cat") == "exchange"]
    assert shown == [("b", "dispatch"), ("e", "dispatch"), ("b", "combine"), ("e", "combine")]
    first, *others = trace_file.read(tmp_path / "again.json").records
    assert first.spans == tuple(span._replace(start=pytest.approx(span.start)) for span in spans)
    assert not any(record.spans for record in others)


@pytest.fixture
def content(timeline, tmp_path):
    """The JSON of a trace."""
    trace_file.write_timeline(tmp_path / "whole.json", timeline)
    return json.loads((tmp_path / "whole.json").read_text())


def changed(content, value, *names):
    """The JSON with another value at this place."""
    *path, last = names
    functools.reduce(lambda part, name: part[name], path, content)[last] = value
    return json.dumps(content).encode()


PIPELINE = "otherData", "pipeline"
FOREIGN = {"traceEvents": [{"name": str(n), "ph": "X", "ts": n, "dur": 1, "pid": 0} for n in range(9999)]}
ACTION = 3  # the first event that is one
DAMAGED = {
    "no JSON": (b"{", "Expecting"),
    "no text": (b"\xff\x00" * 9999, "it is no text"),
    "deep": (b"[" * 100_000, "recursion"),
    "cut gzip": (gzip.compress(b"{}" * 99)[:-9], "its gzip is cut short"),
    "no gzip": (b"\x1f\x8b" + b"x" * 9999, "zlib|[Ee]rror"),
    "foreign": (json.dumps(FOREIGN).encode(), "another program's"),
    "foreign, compressed": (gzip.compress(json.dumps(FOREIGN).encode()), "another program's"),
    "foreign list": (json.dumps(FOREIGN["traceEvents"]).encode(), "another program's"),
    "a shape": (("circle", *PIPELINE, "shape"), "'circle' is unknown"),
    "a text of errors": ((["x"] * 3, *PIPELINE, "clock_errors"), "clock_errors: 0 is "),
    "an error that is none": (([math.nan] * 3, *PIPELINE, "clock_errors"), "clock_errors: 0 is "),
    "few peaks": (([1.0], *PIPELINE, "peak_bytes"), "peaks of 1 ranks"),
    "many ranks": ((10**12, *PIPELINE, "ranks"), "ranks"),
    "many chunks": ((10**12, *PIPELINE, "chunks"), "chunk"),
    "escapes": (("\x1b[31m", *PIPELINE, "schedule"), "cannot be printed"),
    "no events": (([], "traceEvents"), "a rank did nothing"),
    "no kind": (({}, "traceEvents", ACTION, "args"), "an event without 'stage'"),
    "a late start": ((1e308, "traceEvents", ACTION, "ts"), "1e[+]308 stands where a number must"),
    "no start": (("now", "traceEvents", ACTION, "ts"), "stands where a number must"),
    "no number of bytes": ((math.inf, "traceEvents", ACTION, "args", "live_bytes"), "stands where a number"),
    "another stage": ((99, "traceEvents", ACTION, "args", "stage"), "other stages than the 6"),
    "a text of a microbatch": (("1", "traceEvents", ACTION, "args", "microbatch"), "no action is of"),
}
"""What is written, or the value and its place in a trace that is whole, and what is said of it."""


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_trace_is_refused_in_one_short_line(name, content, tmp_path):
    written, message = DAMAGED[name]
    path = tmp_path / "a.json"
    path.write_bytes(written if isinstance(written, bytes) else changed(content, *written))
    with pytest.raises(ValueError, match=message) as error:
        trace_file.read(path)
    assert "is no trace that this package wrote" in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < len(str(path)) + 300


def test_a_trace_may_be_compressed(timeline, content, tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    assert trace_file.read(tmp_path / "a.json.gz").timeline().schedule == timeline.schedule


def test_what_is_measured_of_a_rank_is_read_back(tmp_path):
    """Times from the first action of any rank on; reductions that overlap; errors of clocks; memory."""
    actions = [Action(0, Kind.F, 0)], [Action(1, Kind.F, 0)]
    starts = (5.0, 4.5)
    records = [
        RankRecord(
            tuple(Measured(action, start, start + 1, 8) for action in row),
            16,
            1,
            (
                Reduction(0, start, start + 3),
                Reduction(1, start + 1, start + 2),
                Reduction(0, start + 2, start + 4),
            ),
            clock_error=0.125 * rank,
            device_bytes=None if rank else 2**30,
        )
        for rank, (row, start) in enumerate(zip(actions, starts, strict=True))
    ]
    path = tmp_path / "trace.json"
    trace_file.write(path, "gpipe", linear(2), records)
    begun = [event["id"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "b"]
    assert len(set(begun)) == len(begun) == 6  # viewers join events with the same id
    step = trace_file.read(path)
    assert [record.clock_error for record in step.records] == [0.0, 0.125]
    assert [record.device_bytes for record in step.records] == [2**30, None]
    assert [record.events[0].start for record in step.records] == pytest.approx([0.5, 0.0])
    for record, start in zip(step.records, (0.5, 0.0), strict=True):
        found = sorted((chunk, begin - start, end - start) for chunk, begin, end in record.reductions)
        assert found == [pytest.approx(one) for one in ((0, 0, 3), (0, 2, 4), (1, 1, 2))]
