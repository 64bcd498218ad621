"""Schedules as one page without a network: zoom, what an action needs, and the memory of each rank.

``page.html`` draws what this module writes into it.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.schedule.actions import Action, delivers, needs
from megatron_pp_ext.schedule.simulate import Event, Timeline
from megatron_pp_ext.view.colours import NAMES, colour, ink, parts

SUFFIX = ".html"
"""The end of a page's name."""

FEW = 3
"""The most schedules that a page's title names."""


def write(timelines: Mapping[str, Timeline], path: Path, time_unit: str = "") -> None:
    """Write ``timelines``, by their titles, to the page ``path``; ``time_unit`` is what 1 stands for."""
    write_whole(path, text(timelines, time_unit))


def text(timelines: Mapping[str, Timeline], time_unit: str = "") -> str:
    """Return the page of ``timelines``, by their titles."""
    present = {
        part for timeline in timelines.values() for action in timeline.schedule for part in parts(action.kind)
    }
    content = {
        "panels": [_panel(title, timeline) for title, timeline in timelines.items()],
        "kinds": [(name, colour(kind, 0)) for kind, name in NAMES.items() if kind in present],
    }
    template = Template((resources.files("megatron_pp_ext.view") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(", ".join(timelines) if len(timelines) <= FEW else f"{len(timelines)} schedules"),
        unit=escape(f" ({time_unit})" if time_unit else ""),
        # "</" would end the script that holds it.
        data=json.dumps(content, separators=(",", ":")).replace("</", "<\\/"),
    )


def frame(timeline: Timeline) -> str:
    """Return the page of one timeline as a notebook shows it: in a frame of its own."""
    height = 220 + 46 * len(timeline.events)
    page = escape(text({timeline.schedule.name: timeline}))
    return f'<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:0"></iframe>'


def _panel(title: str, timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    place = {
        delivers(event.action): (rank, index)
        for rank, events in enumerate(timeline.events)
        for index, event in enumerate(events)
    }
    curves = [_curve(timeline, rank) for rank in range(len(timeline.events))]
    return {
        "title": title,
        "numbers": (
            f"{schedule.ranks} ranks, {schedule.whole_microbatches} microbatches"
            + (f" in {schedule.microbatches} units" if schedule.units else "")
            + f", makespan {timeline.makespan:.5g}, bubble {timeline.bubble:.1%}, fullest rank "
            f"{max(timeline.peak_microbatches):.4g} microbatches"
        ),
        "makespan": timeline.makespan,
        "most": max(max(amount for _, amount in curve) for curve in curves) or 1,
        "memory": curves,
        "events": [_events(timeline, events, place) for events in timeline.events],
    }


def _events(
    timeline: Timeline, events: Sequence[Event], place: Mapping[Action, tuple[int, int]]
) -> list[tuple[Any, ...]]:
    """Return what the page has of each of ``events``; ``place`` has the rank and position of what they need.

    That is a label, colours, start and end, the places of what it needs, 1 or 2 for the upper or lower one of
    a pair, and a name.
    """
    schedule = timeline.schedule
    placement, rows, is_second = schedule.placement, list[tuple[Any, ...]](), False
    for action, start, end in events:
        stage, kind, microbatch = action
        chunk, unit = placement.chunk_of(stage), schedule.unit_name(microbatch)
        colours = [colour(part, chunk) for part in parts(kind)]
        waits = [place[need] for need in needs(action, placement) if need in place]
        half = 2 if is_second else int(action in schedule.paired)
        is_second = action in schedule.paired
        times = start - timeline.start, end - timeline.start
        rows.append(
            (unit, colours, ink(chunk), *times, waits, half, f"{kind} of {unit} through stage {stage}")
        )
    return rows


def _curve(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return what the rank keeps from each moment on; of several values at one moment the last."""
    return list({time - timeline.start: live for time, live in timeline.memory(rank)}.items())
