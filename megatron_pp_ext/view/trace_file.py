"""A step as a file that opens in Perfetto (ui.perfetto.dev), recorded or simulated.

The format is the JSON of Chrome's trace events: a complete event ("X") an action, in a track a rank,
a counter ("C") of live activations beside it, a flow ("s", "f") from each action to the one on
another rank that waits for its output, and for each reduction of gradients a pair ("b", "e"), which
may overlap anything.  Times are in microseconds, of recorded steps on the clock of the first rank;
``clock_errors`` says by how many seconds each rank's may be off.  Files of recorded steps can be
read back.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.schedule.actions import Action, Kind, delivers, needs
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, Reduction
from megatron_pp_ext.schedule.simulate import Event, Timeline

_INSIDE = 1e-3
"""Microseconds.  A flow belongs to the event that its time lies in, and an event's end does not."""


class _Track(NamedTuple):
    """One rank: what it did, with the arguments to show beside each action, and its memory curve."""

    events: Sequence[Event]
    arguments: Callable[[int], dict[str, Any]]
    memory: Iterable[tuple[float, float]]
    reductions: Sequence[Reduction] = ()


def write(path: Path, name: str, placement: Placement, records: Sequence[RankRecord]) -> None:
    """Write the recorded step of a pipeline, all times on one clock, replacing ``path`` in one go."""
    start = min(record.events[0].start for record in records)

    def track(record: RankRecord) -> _Track:
        return _Track(
            [Event(event.action, event.start - start, event.end - start) for event in record.events],
            lambda index: {"live_bytes": record.events[index].live_bytes},
            [(event.end - start, event.live_bytes) for event in record.events],
            [Reduction(chunk, begin - start, end - start) for chunk, begin, end in record.reductions],
        )

    about = {
        "schedule": name,
        "shape": placement.shape,
        "ranks": placement.ranks,
        "chunks": placement.chunks,
        "peak_bytes": [record.peak_bytes for record in records],
        "peak_microbatches": [record.peak_microbatches for record in records],
        "clock_errors": [record.clock_error for record in records],
        "device_bytes": [record.device_bytes for record in records],
    }
    counter = {"live activation bytes": "bytes"}
    _write(path, {"pipeline": about}, counter, placement, [track(record) for record in records])


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a simulated step, seconds as seconds, replacing ``path`` in one go.

    The counter is in the unit of ``StageCosts.activation``.
    """
    schedule = timeline.schedule
    tracks = [
        _Track(
            [Event(event.action, *(time - timeline.start for time in event[1:])) for event in events],
            lambda _: {},
            [(time - timeline.start, live) for time, live in timeline.memory(rank)],
        )
        for rank, events in enumerate(timeline.events)
    ]
    about = {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "digest": schedule.digest,
    }
    _write(path, {"simulated": about}, {"live activations": "live"}, schedule.placement, tracks)


def read(path: Path) -> RecordedStep:
    """Read back what ``write`` wrote; ValueError if ``path`` is something else."""
    try:
        content = json.loads(path.read_text())
        pipeline = content["otherData"]["pipeline"]
        placement = Placement(Shape(pipeline["shape"]), pipeline["ranks"], pipeline["chunks"])
        events: list[list[Measured]] = [[] for _ in range(placement.ranks)]
        reductions: list[list[Reduction]] = [[] for _ in range(placement.ranks)]
        started: dict[int, dict[str, Any]] = {}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                events[event["pid"]].append(_measured(event))
            elif event["ph"] == "b":
                started[event["id"]] = event
            elif event["ph"] == "e":
                begin = started.pop(event["id"])
                seconds = (begin["ts"] / 1e6, event["ts"] / 1e6)
                reductions[event["pid"]].append(Reduction(begin["args"]["chunk"], *seconds))
        if not all(events):
            raise ValueError("a rank did nothing")
        peaks = zip(pipeline["peak_bytes"], pipeline["peak_microbatches"], strict=True)
        rest = zip(pipeline["clock_errors"], pipeline["device_bytes"], strict=True)
        return RecordedStep(
            pipeline["schedule"],
            placement,
            tuple(
                RankRecord(tuple(rank), *peak, tuple(reduced), *others)
                for rank, peak, reduced, others in zip(events, peaks, reductions, rest, strict=True)
            ),
        )
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace written by --pipeline-trace ({error!r})") from error


def _measured(event: dict[str, Any]) -> Measured:
    arguments = event["args"]
    action = Action(arguments["stage"], Kind(arguments["kind"]), arguments["microbatch"])
    start = event["ts"] / 1e6
    return Measured(action, start, start + event["dur"] / 1e6, arguments["live_bytes"])


def _write(
    path: Path, about: dict[str, Any], counter: dict[str, str], placement: Placement, tracks: list[_Track]
) -> None:
    """``counter`` maps the title of the memory counter to the name of its series."""
    ((title, series),) = counter.items()
    events: list[dict[str, Any]] = []
    for rank, track in enumerate(tracks):
        here = {"pid": rank, "tid": rank}
        events += [
            {"name": "process_name", "ph": "M", **here, "args": {"name": f"pipeline rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", **here, "args": {"sort_index": rank}},
            {"name": "thread_name", "ph": "M", **here, "args": {"name": "actions"}},
        ]
        for index, (action, start, end) in enumerate(track.events):
            events.append(
                {
                    "name": str(action),
                    "cat": str(action.kind),
                    "ph": "X",
                    **here,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {**action._asdict(), **track.arguments(index)},
                }
            )
        events += [
            {"name": title, "ph": "C", "pid": rank, "ts": time * 1e6, "args": {series: live}}
            for time, live in track.memory
        ]
    events += _flows(placement, tracks)
    events += _reductions(tracks)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"traceEvents": events, "otherData": about}))


def _flows(placement: Placement, tracks: list[_Track]) -> Iterator[dict[str, Any]]:
    """Two events a message: inside the action that sends, at its end, and at the start of the other."""
    sent = {
        delivers(event.action): (rank, event) for rank, track in enumerate(tracks) for event in track.events
    }
    number = 0
    for rank, track in enumerate(tracks):
        for action, start, _ in track.events:
            for need in needs(action, placement):
                sender, event = sent.get(need, (rank, None))
                if event is None or sender == rank:
                    continue
                number += 1
                flow = {"name": "message", "cat": "message", "id": number}
                leaves = max(event.start * 1e6, event.end * 1e6 - _INSIDE)
                yield {**flow, "ph": "s", "pid": sender, "tid": sender, "ts": leaves}
                yield {**flow, "ph": "f", "bp": "e", "pid": rank, "tid": rank, "ts": start * 1e6}


def _reductions(tracks: list[_Track]) -> Iterator[dict[str, Any]]:
    numbers = count()
    for rank, track in enumerate(tracks):
        for chunk, start, end in track.reductions:
            event = {"name": f"reduce chunk {chunk}", "cat": "reduction", "id": next(numbers), "pid": rank}
            yield {**event, "tid": rank, "ph": "b", "ts": start * 1e6, "args": {"chunk": chunk}}
            yield {**event, "tid": rank, "ph": "e", "ts": end * 1e6}
