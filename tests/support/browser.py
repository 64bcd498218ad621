"""Asks a real browser, without a window, where it draws the parts of a page."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_ASK = """<script>
const found = {};
for (const one of document.querySelectorAll(%s)) {
  const {left, top, right, bottom} = one.getBoundingClientRect();
  (found[one.closest("[id]")?.id ?? ""] ||= []).push([left, top, right, bottom]);
}
const {scrollWidth, clientWidth} = document.documentElement;
document.body.innerHTML = "<pre>" + JSON.stringify({found, scrollWidth, clientWidth}) + "</pre>";
</script>"""


def drawn(
    page: Path, selector: str, folder: Path, width: int = 1280
) -> tuple[dict[str, list[list[float]]], int]:
    """Return where a window of ``width`` pixels shows what ``selector`` finds on ``page``.

    The boxes, (left, top, right, bottom) in pixels, go by the id of the element, or else of what it is in.
    Beside them stand the pixels by which the page is wider than the window.
    """
    content = asked(page, _ASK % json.dumps(selector), folder, width)
    return content["found"], content["scrollWidth"] - content["clientWidth"]


ANSWER = 'document.body.innerHTML = "<pre>" + JSON.stringify(%s) + "</pre>";'
"""The statement with which a script of ``asked`` ends: it replaces the page by what it found."""


def asked(page: Path, script: str, folder: Path, width: int = 1280) -> Any:
    """Return what ``script``, HTML with an ``ANSWER``, finds on ``page`` in a window of ``width`` pixels."""
    copy = folder / "asked.html"
    copy.write_text(page.read_text() + script)
    result = _run(copy, folder, width, "--dump-dom")
    answer = re.search("<pre>(.*?)</pre>", result.stdout, re.DOTALL)
    assert answer, result.stdout + result.stderr
    return json.loads(unescape(answer[1]))


def screenshot(page: Path, picture: Path, width: int) -> list[str]:
    """Draw ``page``, ``width`` pixels wide, to the PNG file ``picture``; return the lines of its console."""
    done = _run(page, picture.parent, width, "--enable-logging=stderr", f"--screenshot={picture}")
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _run(page: Path, folder: Path, width: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Open ``page`` in a window of ``width`` pixels, with its files in ``folder``."""
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1400", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120)
