"""How schedules, timelines and estimates show themselves in a notebook: as a page in a frame, and as HTML."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from itertools import cycle
from typing import Protocol

from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import page


def html(shown: Schedule | Timeline) -> str:
    """Return what a notebook shows of a timeline, or of a schedule at unit cost."""
    return page.frame(simulate(shown) if isinstance(shown, Schedule) else shown)


class ShownEstimate(Protocol):
    """What a notebook shows of an estimate: ``planner.estimated_job.EstimatedJob``, the words of a terminal.

    ``memory`` has the bytes of each rank by what they are for, ``device_bytes`` are what a device has, and
    ``alternatives`` are name, seconds and gigabytes of the job's step and of others.
    """

    notes: Sequence[str]
    sizes: Sequence[str]
    title: str
    times: Sequence[str]
    memory: Mapping[str, Sequence[float]]
    device_bytes: float
    memory_table: Mapping[str, Sequence[str]]
    about_memory: Sequence[str]
    alternatives: Sequence[tuple[str, str, str]]
    warnings: Sequence[str]
    command: str
    about_command: Sequence[str]


_ESTIMATE = "megatron_pp_ext.planner.estimated_job", "EstimatedJob"
"""The module and the name of the type with these words, which is imported by whoever makes one."""

_COLOURS = (
    *("#5b9bd5", "#e0a24a", "#7fb858", "#7a6a58", "#a98bc6"),
    *("#5fc8c8", "#c0504d", "#c9c04d", "#8a8f94", "#3f5f8f"),
)
"""The colours of the parts of a rank's memory, in their order."""


def estimate_html(shown: ShownEstimate) -> str:
    """Return what a notebook shows of an estimate: in the notebook's own colours, as wide as its cell."""
    compared = shown.alternatives
    return (
        '<div style="max-width:60em;overflow-wrap:anywhere">'
        f"{_lines(shown.notes)}<p><b>{escape(shown.title)}</b><br>{'<br>'.join(map(escape, shown.times))}</p>"
        f"{_lines(shown.sizes)}"
        f"{_bars(shown.memory, shown.device_bytes)}"
        f"<details><summary>GB on each rank</summary>{_memory_table(shown.memory_table)}</details>"
        f"{_lines(shown.about_memory)}"
        f"{_table(('', 'a step', 'on the fullest rank'), compared) if compared else ''}"
        f"{_lines(shown.warnings)}"
        f"<details><summary>The command that trains it</summary><pre>{escape(shown.command)}</pre>"
        f"{_lines(shown.about_command)}</details></div>"
    )


def _lines(lines: Sequence[str]) -> str:
    return f"<p>{'<br>'.join(map(escape, lines))}</p>" if lines else ""


_ROW = "display:flex;align-items:center;gap:.6em;margin:1px 0"
_BAR = (
    "position:relative;flex:auto;display:block;height:1em;line-height:0;white-space:nowrap;background:#8882"
)
_SQUARE = "display:inline-block;width:.8em;height:.8em"
_END = "position:absolute;top:0;bottom:0;border-left:2px solid currentColor"


def _bars(memory: Mapping[str, Sequence[float]], device_bytes: float) -> str:
    """Return the memory of each rank as a bar of its parts; a line marks the end of a device's memory."""
    totals = [sum(sizes) for sizes in zip(*memory.values(), strict=True)]
    most = max(*totals, device_bytes)
    colours = dict(zip(memory, cycle(_COLOURS), strict=False))
    end = _span(f"{_END};left:{device_bytes / most:.3%}")
    rows = []
    for rank, total in enumerate(totals):
        sizes = {name: row[rank] for name, row in memory.items()}
        parts = "".join(
            _span(
                f"display:inline-block;height:100%;width:{size / most:.3%};background:{colours[name]}",
                about=f"rank {rank}: {name} {size / 1e9:.2f} GB",
            )
            for name, size in sizes.items()
        )
        number = _span("width:4em;flex:none", f"rank {rank}")
        words = _span("width:5em;flex:none;text-align:right", f"{total / 1e9:.1f} GB")
        rows.append(f'<div style="{_ROW}">{number}{_span(_BAR, parts + end)}{words}</div>')
    legend = " ".join(
        _span("white-space:nowrap", f"{_span(f'{_SQUARE};background:{colour}')} {escape(name)}")
        for name, colour in colours.items()
    )
    return f"{''.join(rows)}<p>{legend}; the line is at a device's {device_bytes / 1e9:.1f} GB</p>"


def _span(style: str, content: str = "", about: str = "") -> str:
    """Return a span with ``content``, which is HTML; ``about`` is shown where a mouse is over it."""
    title = f' title="{escape(about)}"' if about else ""
    return f'<span style="{style}"{title}>{content}</span>'


def _memory_table(table: Mapping[str, Sequence[str]]) -> str:
    """Return ``table``, which has the ranks' texts by name, with a row for each rank."""
    ranks = zip(*table.values(), strict=True)
    return _table(("rank", *table), [(str(rank), *texts) for rank, texts in enumerate(ranks)])


_CELL = ' style="padding:.1em 1em .1em 0;text-align:left"'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_CELL}>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td{_CELL}>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}</div>'


@cache
def register() -> None:
    """Let IPython, where this process is its kernel, show schedules, timelines and estimates as HTML."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        ways = shell.display_formatter.formatters["text/html"]
        for shown in (Schedule, Timeline):
            ways.for_type(shown, html)
        ways.for_type_by_name(*_ESTIMATE, estimate_html)
