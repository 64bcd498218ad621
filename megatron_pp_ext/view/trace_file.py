"""A step as a file that opens in Perfetto (ui.perfetto.dev), recorded or simulated.

The format is the JSON of Chrome's trace events.  Each rank has a track with a complete event ("X") for
each action, and a counter ("C") of live activations beside it.  A flow ("s", "f") leads from each action to
the one on another rank that waits for its output.  Each reduction of gradients is a pair ("b", "e"), which
may overlap anything.  Times are in microseconds, for recorded steps on the clock of the first rank, from
which each rank's clock may differ by its ``clock_errors``, in seconds.  Files of recorded steps can be read
back.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.schedule.actions import Action, Kind, delivers, needs
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, Reduction
from megatron_pp_ext.schedule.simulate import Event, Timeline

_INSIDE = 1e-3
"""Microseconds by which a flow starts before its action's end: an event does not contain its own end."""


class _Track(NamedTuple):
    """The actions of one rank, the arguments to show beside each of them, and its memory curve."""

    events: Sequence[Event]
    arguments: Iterable[dict[str, Any]]
    memory: Iterable[tuple[float, float]]
    reductions: Sequence[Reduction] = ()


def write(path: Path, name: str, placement: Placement, records: Sequence[RankRecord]) -> None:
    """Write the recorded step of a pipeline, all times on one clock, replacing ``path`` in one go."""
    start = min(record.events[0].start for record in records)
    tracks = [
        _Track(
            [Event(*event[:3]) for event in record.events],
            [{"live_bytes": event.live_bytes} for event in record.events],
            [(event.end, event.live_bytes) for event in record.events],
            record.reductions,
        )
        for record in (record.moved(-start, record.clock_error) for record in records)
    ]
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
    _write(path, {"pipeline": about}, counter, placement, tracks)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a simulated step, seconds as seconds, replacing ``path`` in one go.

    The counter is in the unit of ``StageCosts.activation``.
    """
    schedule = timeline.schedule
    tracks = [
        _Track(
            [Event(event.action, *(time - timeline.start for time in event[1:])) for event in events],
            repeat({}),
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
    """Read a file that ``write`` wrote; ValueError if ``path`` is something else."""
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
    """Write ``tracks``; ``counter`` maps the title of the memory counter to the name of its series."""
    ((title, series),) = counter.items()
    events: list[dict[str, Any]] = []
    for rank, track in enumerate(tracks):
        here = {"pid": rank, "tid": rank}
        events += [
            {"name": "process_name", "ph": "M", **here, "args": {"name": f"pipeline rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", **here, "args": {"sort_index": rank}},
            {"name": "thread_name", "ph": "M", **here, "args": {"name": "actions"}},
        ]
        for (action, start, end), arguments in zip(track.events, track.arguments, strict=False):
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            arguments = {**action._asdict(), **arguments}
            event = {"name": str(action), "cat": str(action.kind), "ph": "X"}
            events.append({**event, **here, **times, "args": arguments})
        events += [
            {"name": title, "ph": "C", "pid": rank, "ts": time * 1e6, "args": {series: live}}
            for time, live in track.memory
        ]
    events += _flows(placement, tracks)
    events += _reductions(tracks)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"traceEvents": events, "otherData": about}))


def _flows(placement: Placement, tracks: list[_Track]) -> Iterator[dict[str, Any]]:
    """Yield two events for each message, at the end of the sending action and the start of the other."""
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
