"""A step as a file that opens in Perfetto (ui.perfetto.dev), recorded or simulated, and the reader of both.

The format is the JSON of Chrome's trace events.  Nothing in a file is trusted: whoever sends a trace may have
changed it.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Annotated, Any, ClassVar

from megatron_pp_ext.files import TEXT, read_bytes, write_whole
from megatron_pp_ext.json_input import STRICT, at_least, is_number, one_of, parse_as, printable, short
from megatron_pp_ext.schedule.actions import WAYS, Action, Kind, Label, Span, delivers, label, needs
from megatron_pp_ext.schedule.costs import MOST, Costs, UnitCosts, in_files
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.recorded import (
    SECONDS,
    Measured,
    RankRecord,
    RecordedStep,
    Reduction,
    UnitNames,
)
from megatron_pp_ext.schedule.simulate import Copied, Event, Timeline

_INSIDE = 1e-3
"""Microseconds by which a flow starts before its action's end: an event does not contain its own end."""

REDUCTION = "reduction"
"""The category of reductions of gradients."""

type _Curve = Sequence[tuple[float, float]]
"""The live activations of a rank: (time, amount from then on)."""


def write(path: Path, name: str, placement: Placement, records: Sequence[RankRecord]) -> None:
    """Write the recorded step of a pipeline, all times on one clock, replacing ``path`` in one go."""
    start = min(record.events[0].start for record in records)
    moved = tuple(record.moved(-start, record.clock_error) for record in records)
    curves = [[(event.end, event.live_bytes) for event in record.events] for record in moved]
    _write(path, RecordedStep(name, placement, moved), curves)


def write_timeline(path: Path, timeline: Timeline, units: UnitNames = SECONDS) -> None:
    """Write a simulated step whose times and activations are in ``units``, replacing ``path`` in one go."""
    schedule, start = timeline.schedule, timeline.start
    records = tuple(
        _simulated(timeline, events, peak)
        for events, peak in zip(timeline.events, timeline.peak_activations, strict=True)
    )
    curves = [[(time - start, live) for time, live in timeline.memory(rank)] for rank in range(len(records))]
    about: dict[str, Any] = {"makespan": timeline.makespan, "digest": schedule.digest}
    if isinstance(timeline.costs, UnitCosts):
        about["tokens"] = timeline.costs.tokens
    if timeline.copies:
        records = tuple(
            record._replace(spans=tuple(_simulated_copies(copies, start)))
            for record, copies in zip(records, timeline.copies, strict=True)
        )
    _write(path, RecordedStep(schedule.name, schedule.placement, records, units), curves, about)


def _simulated_copies(copies: Iterable[Copied], start: float) -> Iterator[Span]:
    """Yield the spans of a rank's copies as a recorder would have them, in a step from ``start`` on."""
    for copied in copies:
        for way in WAYS:
            begin, end = getattr(copied, way)
            yield Span(label(way, copied.stage, copied.microbatch), begin - start, end - start)


def _on_tracks(records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """Yield the spans that have tracks, which stand after the tracks of all ranks' actions."""
    spans = (span for record in records for span in record.spans)
    tracks = [track for track in dict.fromkeys(span.label.track for span in spans) if track]
    for rank, record in enumerate(records):
        for number, track in enumerate(tracks, 1):
            ids = {"pid": rank, "tid": number * len(records) + rank}
            on_track = [span for span in record.spans if span.label.track == track]
            if on_track:
                yield {"name": "thread_name", "ph": "M", **ids, "args": {"name": track}}
            for (category, name, _, about), start, end in on_track:
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                yield {"name": name, "cat": category, "ph": "X", **ids, **times, "args": dict(about)}


def _simulated(timeline: Timeline, events: Sequence[Event], peak: float) -> RankRecord:
    actions, each_counts = [action for action, _, _ in events], Costs.unit(timeline.schedule.placement)
    live_after = accumulate(map(timeline.costs.kept, actions))
    pairs = accumulate(map(each_counts.kept, actions))
    measured = (
        Measured(action, begin - timeline.start, end - timeline.start, live)
        for (action, begin, end), live in zip(events, live_after, strict=True)
    )
    return RankRecord(tuple(measured), peak, int(max(pairs)))


def _write(
    path: Path, step: RecordedStep, curves: Sequence[_Curve], simulated: dict[str, Any] | None = None
) -> None:
    """Write ``step`` with one memory curve a rank; ``simulated`` only a simulated step has.

    Each rank has a track with a complete event ("X") for each action, and a counter ("C") of live activations
    with it.  A flow ("s", "f") leads from each action to the one on another rank that waits for its output.
    Each reduction of gradients is two events ("b", "e"), which may overlap anything, and so is each span
    without a track (``actions.Label``).  Other spans are complete events on tracks of their own.  Times are
    in microseconds, for recorded steps on the clock of the first rank, from which each rank's clock may
    differ by its ``clock_errors``, in seconds.  A simulated step has a second of the trace for each 1 of its
    times, whose unit the file names.
    """
    records = step.records
    about = {
        "schedule": step.name,
        "shape": step.placement.shape,
        "ranks": step.placement.ranks,
        "chunks": step.placement.chunks,
        in_files("splits_head"): step.placement.splits_head,
        "ends_on_last": step.placement.ends_on_last,
        "units": step.units,
        "peak_bytes": [record.peak_bytes for record in records],
        "peak_microbatches": [record.peak_microbatches for record in records],
        "clock_errors": [record.clock_error for record in records],
        "device_bytes": [record.device_bytes for record in records],
    }
    events: list[dict[str, Any]] = []
    tokens = (simulated or {}).get("tokens")
    for rank, (record, curve) in enumerate(zip(records, curves, strict=True)):
        ids = {"pid": rank, "tid": rank}
        events += [
            {"name": "process_name", "ph": "M", **ids, "args": {"name": f"pipeline rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", **ids, "args": {"sort_index": rank}},
            {"name": "thread_name", "ph": "M", **ids, "args": {"name": "actions"}},
        ]
        for event in record.events:
            times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
            kind = {"name": str(event.action), "cat": str(event.action.kind), "ph": "X"}
            arguments = {**event.action._asdict(), "live_bytes": event.live_bytes}
            if tokens is not None:
                arguments["tokens"] = tokens[event.action.microbatch]
            if event.processor_seconds is not None:
                arguments["processor_seconds"] = event.processor_seconds
            events.append({**kind, **ids, **times, "args": arguments})
        counter = {"name": f"live activations, {step.units.memory}", "ph": "C", "pid": rank}
        events += [{**counter, "ts": time * 1e6, "args": {"live": live}} for time, live in curve]
    events += _flows(step)
    events += [*_between_actions(records), *_on_tracks(records)]
    path.parent.mkdir(parents=True, exist_ok=True)
    other = {"pipeline": about, **({"simulated": simulated} if simulated else {})}
    write_whole(path, json.dumps({"traceEvents": events, "otherData": other}))


def _flows(step: RecordedStep) -> Iterator[dict[str, Any]]:
    """Yield two events for each message, at the end of the sending action and the start of the other."""
    sent = {
        delivers(event.action): (rank, event)
        for rank, record in enumerate(step.records)
        for event in record.events
    }
    number = 0
    for rank, record in enumerate(step.records):
        for action, start, *_ in record.events:
            for need in needs(action, step.placement):
                sender, event = sent.get(need, (rank, None))
                if event is None or sender == rank:
                    continue
                number += 1
                flow = {"name": "message", "cat": "message", "id": number}
                leaves = max(event.start * 1e6, event.end * 1e6 - _INSIDE)
                yield {**flow, "ph": "s", "pid": sender, "tid": sender, "ts": leaves}
                yield {**flow, "ph": "f", "bp": "e", "pid": rank, "tid": rank, "ts": start * 1e6}


def _between_actions(records: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """Yield two events for each reduction of gradients and each span without a track."""
    numbers = count()
    for rank, record in enumerate(records):
        reductions = (
            (f"reduce chunk {chunk}", REDUCTION, {"chunk": chunk}, start, end)
            for chunk, start, end in record.reductions
        )
        spans = (
            (name, category, dict(about), start, end)
            for (category, name, track, about), start, end in record.spans
            if not track
        )
        for name, category, about, start, end in chain(reductions, spans):
            event = {"name": name, "cat": category, "id": next(numbers), "pid": rank, "tid": rank}
            yield {**event, "ph": "b", "ts": start * 1e6, "args": about}
            yield {**event, "ph": "e", "ts": end * 1e6}


_LARGEST = 2**28
"""The most bytes of a trace, whose JSON is decompressed: about half a million actions."""

_GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip wrote."""

_KINDS = frozenset(map(str, Kind))
"""The categories of actions."""

type _Count = Annotated[int, at_least(1)]
type _Label = Annotated[str, printable()]


@dataclass(frozen=True, slots=True)
class _About:
    """The description of its step in a trace; the lists have an entry for each rank (``RankRecord``)."""

    __pydantic_config__: ClassVar = {**STRICT, "alias_generator": in_files}

    schedule: _Label
    shape: Annotated[str, one_of(*Shape)]
    ranks: _Count
    chunks: _Count
    peak_bytes: tuple[float, ...]
    peak_microbatches: tuple[int, ...]
    clock_errors: tuple[float, ...]
    device_bytes: tuple[int | None, ...]
    splits_head: bool = False
    ends_on_last: bool = False
    units: tuple[_Label, _Label] = SECONDS


def read(path: Path) -> RecordedStep:
    """Read a file that ``trace_file`` wrote, which gzip may have compressed.

    Raises ValueError, in one line, if ``path`` is something else, and OSError as from ``read_bytes``.
    """
    try:
        return _step(_content(path))
    except UnicodeDecodeError:
        reason = "it is no text"
    except KeyError as error:
        reason = f"it has an event without {error}"
    except (TypeError, IndexError, AttributeError, ValueError, RecursionError, zlib.error) as error:
        reason = str(error)
    raise ValueError(
        f"{path} is no trace that this package wrote ({reason}): give a file of --pipeline-trace, or of mpp "
        "schedule or mpp rehearse --trace"
    )


def _content(path: Path) -> Any:
    written = read_bytes(path, _LARGEST)
    if written.startswith(_GZIP):
        unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # 16: of gzip's form
        written = unpacking.decompress(written, _LARGEST)
        if not unpacking.eof:
            raise ValueError(f"its gzip is cut short, or holds more than {_LARGEST:,} bytes")
    return json.loads(written.decode(TEXT))


def _step(content: Any) -> RecordedStep:
    other_data = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(other_data, dict) or "pipeline" not in other_data:
        raise ValueError("its events are another program's, which ui.perfetto.dev shows")
    about = parse_as(_About, json.dumps(other_data["pipeline"]), "")
    if len(about.peak_bytes) != about.ranks:
        raise ValueError(f"it has peaks of {len(about.peak_bytes)} ranks, and {about.ranks} ranks")
    sizes = about.ranks, about.chunks, about.splits_head, about.ends_on_last
    placement = Placement(Shape(about.shape), *sizes)
    events: list[list[Measured]] = [[] for _ in range(placement.ranks)]
    reductions: list[list[Reduction]] = [[] for _ in range(placement.ranks)]
    spans: list[list[Span]] = [[] for _ in range(placement.ranks)]
    tracks: dict[tuple[int, int], str] = {}
    started: dict[int, dict[str, Any]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] in _KINDS:
            events[event["pid"]].append(_measured(event))
        elif event["ph"] == "X":
            track = tracks.get((event["pid"], event["tid"]), "")
            spans[event["pid"]].append(Span(_label(event, event["args"], track), **_times(event)))
        elif event["ph"] == "b":
            started[event["id"]] = event
        elif event["ph"] == "e":
            begin = started.pop(event["id"])
            seconds = (_number(begin["ts"]) / 1e6, _number(event["ts"]) / 1e6)
            if event["cat"] == REDUCTION:
                reductions[event["pid"]].append(Reduction(begin["args"]["chunk"], *seconds))
            else:
                spans[event["pid"]].append(Span(_label(event, begin["args"]), *seconds))
    if not all(events):
        raise ValueError("a rank did nothing")
    acted = {event.action.stage for rank in events for event in rank}
    if len(acted) < placement.stages or not acted <= {*range(placement.stages)}:
        raise ValueError(f"its actions are of other stages than the {placement.stages} of its placement")
    numbers = zip(
        about.peak_bytes, about.peak_microbatches, about.clock_errors, about.device_bytes, strict=True
    )
    return RecordedStep(
        about.schedule,
        placement,
        tuple(
            RankRecord(
                tuple(rank), size, microbatches, tuple(sums), error, device_bytes, tuple(spans_of_rank)
            )
            for rank, (size, microbatches, error, device_bytes), sums, spans_of_rank in zip(
                events, numbers, reductions, spans, strict=True
            )
        ),
        UnitNames(*about.units),
    )


def _measured(event: dict[str, Any]) -> Measured:
    arguments = event["args"]
    stage, microbatch = arguments["stage"], arguments["microbatch"]
    if not (isinstance(stage, int) and isinstance(microbatch, int) and 0 <= microbatch <= MOST):
        raise ValueError(f"no action is of stage {short(stage)} and microbatch {short(microbatch)}")
    seconds = arguments.get("processor_seconds")
    return Measured(
        Action(stage, Kind(arguments["kind"]), microbatch),
        **_times(event),
        live_bytes=_number(arguments["live_bytes"]),
        processor_seconds=None if seconds is None else _number(seconds),
    )


def _label(event: dict[str, Any], about: dict[str, int | str], track: str = "") -> Label:
    return Label(event["cat"], event["name"], track, tuple(about.items()))


def _times(event: dict[str, Any]) -> dict[str, Any]:
    start = _number(event["ts"]) / 1e6
    return {"start": start, "end": start + _number(event["dur"]) / 1e6}


def _number(value: object) -> float:
    """Return ``value``; ValueError unless it is a number that sums and pictures take."""
    if not is_number(value) or abs(value) > MOST:
        raise ValueError(f"{short(value)} stands where a number must, of {MOST:g} at most")
    return value
