"""The page of results of ``make mutants``: each command writes a section of its own and leaves the others."""

import re
from pathlib import Path

from benchmarks.report import RESULTS, provenance

PAGE = RESULTS / "mutants.md"

HEAD = """# Tests that notice

`make mutants` breaks one place of the source at a time and runs tests that should notice. In the pure-Python
rooms a tool does so; for the others there is a list of planted defects (`tests/hunt/mutants/planted`).
"""


def write_section(title: str, text: str, page: Path = PAGE) -> None:
    """Replace the section ``title`` of ``page`` by ``text``, under a line about this run, or add it."""
    whole = page.read_text(encoding="utf-8") if page.exists() else HEAD
    section = f"## {title}\n\n{provenance()}\n\n{text.strip()}\n"
    parts = re.split(r"^(?=## )", whole, flags=re.MULTILINE)
    kept = [part.rstrip() + "\n" for part in parts]
    at = next((at for at, part in enumerate(kept) if part.startswith(f"## {title}\n")), len(kept))
    kept[at : at + 1] = [section]
    page.write_text("\n".join(kept), encoding="utf-8")
