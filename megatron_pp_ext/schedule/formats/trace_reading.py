"""Reads the steps that ``trace_file`` wrote, of which gzip may have made a .json.gz.

Nothing in a file is trusted: whoever sends a trace may have changed it.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from megatron_pp_ext.files import TEXT, read_bytes
from megatron_pp_ext.json_input import STRICT, at_least, is_number, one_of, parse_as, printable, short
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.costs import MOST
from megatron_pp_ext.schedule.file_names import in_files
from megatron_pp_ext.schedule.formats.trace_file import REDUCTION
from megatron_pp_ext.schedule.placement import Placement, Shape
from megatron_pp_ext.schedule.recorded import (
    SECONDS,
    Measured,
    RankRecord,
    RecordedStep,
    Reduction,
    UnitNames,
)
from megatron_pp_ext.schedule.spans import Label, Span

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
