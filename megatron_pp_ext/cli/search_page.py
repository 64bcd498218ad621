"""The result of a search as a page that a browser shows without anything else, also on a small screen."""

from collections.abc import Mapping, Sequence
from html import escape

from megatron_pp_ext.planner.search.variants import offered

_STYLE = (
    "body{font-family:sans-serif;margin:1em auto;padding:0 1em;max-width:80em;color:#10222e}"
    "body{overflow-wrap:anywhere}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}h3{font-size:1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #e6e9ec;text-align:left}"
    "dt{font-weight:bold;margin-top:.4em}dd{margin-left:1em}"
    ".wide{overflow-x:auto;overflow-wrap:normal}.wide svg{min-width:40em;max-width:100%;height:auto}"
    "pre{white-space:pre-wrap;background:#f5f7f8;padding:.8em}"
)

_LABELS: Mapping[str, str] = {
    "tp, cp, ep, etp, pp, dp": "ranks that share tensors, context, experts, an expert, layers, and data",
    "mb": "sequences of a microbatch",
    "v-half, 1f1b, ...": "the schedule; a number after it is that of its chunks a rank, from three on",
    "shared": "all pipeline ranks share the embedding and the output layer",
    "recompute-...": "activations that the backward computes again: full ones, or of some modules",
    "uneven": "stages have different numbers of layers, which the command has as a layout",
    "MFU": "the part of the devices' peak rate that the model's own arithmetic is",
    "bubble": "the part of a pipeline's time in which ranks are idle",
    "GB a rank": "what the fullest rank needs as estimated, and at most; messages are a part of it",
}


def page(
    title: str,
    about: Mapping[str, str],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    picture: str,
    commands: Mapping[str, str],
) -> str:
    """Return the page: what was searched, headings and rows, a picture as SVG, and a command by its name.

    The first of ``commands`` is that of the best.
    """
    headings, rows = table
    head = _row("th", headings)
    body = "".join(_row("td", row) for row in rows)
    best, *others = (f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in commands.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{_list(about)}"
        f"<h2>The best</h2><div class=wide><table>{head}{body}</table></div>"
        f"<h2>The command of the best</h2>{best}"
        f"<h2>Memory and throughput</h2><div class=wide>{picture}</div>"
        f"<h2>What the words stand for</h2>{_list(_labels())}"
        f"<h2>The commands of the others, and of the shortest steps for less memory</h2>{''.join(others)}"
        "</html>\n"
    )


def _labels() -> dict[str, str]:
    """Return what the words of a configuration stand for, those of features before the numbers of a table."""
    at = list(_LABELS).index("MFU")
    own, of_features = list(_LABELS.items()), [one.label for one in offered()]
    return dict([*own[:at], *of_features, *own[at:]])


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _list(entries: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(a)}</dt><dd>{escape(b)}</dd>' for a, b in entries.items())}</dl>"
