"""The common parts of all pages of results: their place, the line about a run, and Markdown tables."""

import inspect
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path(__file__).parent / "results"
Row = Sequence[object]
Out = Annotated[Path, typer.Option(help="The page to write; - prints it.", metavar="FILE")]
Keep = Annotated[
    Path | None, typer.Option(help="A folder that keeps what was measured: a later command goes on with it.")
]

_LOAD = os.getloadavg()[0]


def provenance() -> str:
    """Return the command that runs, the machine with its load at the start, the Python and the day."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else "?"
    command = shlex.join(["python", "-m", name, *sys.argv[1:]])
    machine = f"{_processor()}, {len(os.sched_getaffinity(0))} cores, load {_LOAD:.1f} at the start"
    return f"`{command}` on {machine}, Python {platform.python_version()}, {date.today()}."


def publish(out: Path, title: str, about: str, *sections: str) -> None:
    """Write a page to ``out``, or print it if that is ``-``."""
    page = "\n\n".join([f"# {title}", f"{provenance()} {about}".rstrip(), *sections]).rstrip() + "\n"
    if str(out) == "-":
        print(page, end="")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")


def picture_of(out: Path, name: str) -> Path:
    """Return the place of a page's picture: next to ``out``, and in the results if ``out`` is printed."""
    return (RESULTS / name if str(out) == "-" else out).with_suffix(".png")


@contextmanager
def kept_in(keep: Path | None) -> Iterator[Path]:
    """Yield the folder ``keep``, or one that is gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        place = keep or Path(folder)
        place.mkdir(exist_ok=True)
        yield place


def sections(parts: Mapping[str, Callable[[], str]]) -> list[str]:
    """Return a section for each part: its title, the docstring of its function, and that function's text."""
    pages = []
    for title, part in parts.items():
        start = time.monotonic()
        pages += [f"## {title}", inspect.cleandoc(part.__doc__ or ""), part()]
        print(f"{title}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return pages


def table(head: Row, rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
