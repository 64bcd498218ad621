"""A recorded step as a file that opens in Perfetto (ui.perfetto.dev) and can be read back.

The format is the JSON of Chrome's trace events: a complete event ("X") an action, in a track a rank,
and a counter ("C") of live activation bytes beside it; times in microseconds.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.measured import Measured, RankRecord, RecordedStep
from megatron_pp_ext.schedule.placement import Placement, Shape


def write(path: Path, name: str, placement: Placement, records: Sequence[RankRecord]) -> None:
    """Write the step of a pipeline, replacing ``path`` in one go."""
    start = min(record.events[0].start for record in records)
    events: list[dict[str, Any]] = []
    for rank, record in enumerate(records):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        )
        for action, begin, end, live_bytes in record.events:
            events.append(
                {
                    "name": str(action),
                    "cat": str(action.kind),
                    "ph": "X",
                    "pid": rank,
                    "tid": rank,
                    "ts": (begin - start) * 1e6,
                    "dur": (end - begin) * 1e6,
                    "args": {**action._asdict(), "live_bytes": live_bytes},
                }
            )
            events.append(
                {
                    "name": "live activation bytes",
                    "ph": "C",
                    "pid": rank,
                    "ts": (end - start) * 1e6,
                    "args": {"bytes": live_bytes},
                }
            )
    pipeline = {
        "schedule": name,
        "shape": placement.shape,
        "ranks": placement.ranks,
        "chunks": placement.chunks,
        "peak_bytes": [record.peak_bytes for record in records],
        "peak_microbatches": [record.peak_microbatches for record in records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps({"traceEvents": events, "otherData": {"pipeline": pipeline}}))
    os.replace(unfinished, path)


def read(path: Path) -> RecordedStep:
    """Read back what ``write`` wrote; ValueError if ``path`` is something else."""
    try:
        content = json.loads(path.read_text())
        pipeline = content["otherData"]["pipeline"]
        placement = Placement(Shape(pipeline["shape"]), pipeline["ranks"], pipeline["chunks"])
        events: list[list[Measured]] = [[] for _ in range(placement.ranks)]
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                events[event["pid"]].append(_measured(event))
        records = zip(events, pipeline["peak_bytes"], pipeline["peak_microbatches"], strict=True)
        return RecordedStep(
            pipeline["schedule"],
            placement,
            tuple(RankRecord(tuple(rank), peak_bytes, peak) for rank, peak_bytes, peak in records),
        )
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a trace written by --pipeline-trace ({error!r})") from error


def _measured(event: dict[str, Any]) -> Measured:
    arguments = event["args"]
    action = Action(arguments["stage"], Kind(arguments["kind"]), arguments["microbatch"])
    start = event["ts"] / 1e6
    return Measured(action, start, start + event["dur"] / 1e6, arguments["live_bytes"])
