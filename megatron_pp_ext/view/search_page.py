"""The result of a search as a page that needs no network: ``search.html`` with what this module fills in."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template


def text(
    title: str,
    picture: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    stock: Iterable[Sequence[str]],
    commands: Mapping[str, str],
    about: Mapping[str, str],
    labels: Mapping[str, str],
) -> str:
    """Return the page of a search.

    ``picture`` is an SVG.  The table has ``headings``, ``rows``, and the rows of ``stock``, which are marked.
    ``commands`` are by the names of their configurations, the best one first, which alone is
    open.  ``about`` says what was searched, and ``labels`` what words stand for.
    """
    template = Template((resources.files("megatron_pp_ext.view") / "search.html").read_text(encoding="utf-8"))
    marked = [*((row, "") for row in rows), *((row, " class=stock") for row in stock)]
    return template.substitute(
        title=escape(title),
        picture=picture,
        head="".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings),
        rows="\n".join(f"<tr{mark}>{_cells(headings, row)}</tr>" for row, mark in marked),
        commands="\n".join(
            f"<details{' open' * (not place)}><summary>{escape(name)}</summary>"
            f"<pre>{escape(command)}</pre></details>"
            for place, (name, command) in enumerate(commands.items())
        ),
        about=_list(about),
        labels=_list(labels),
    )


def _cells(headings: Sequence[str], row: Sequence[str]) -> str:
    return "".join(
        f'<td data-name="{escape(heading)}">{escape(cell)}</td>'
        for heading, cell in zip(headings, row, strict=True)
    )


def _list(entries: Mapping[str, str]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in entries.items())
