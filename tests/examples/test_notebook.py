"""The notebook runs, and what its cells end with shows itself."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext import EstimatedJob, Schedule, Timeline
from megatron_pp_ext.view import notebook

NOTEBOOK = Path(__file__).parents[2] / "examples" / "schedules.ipynb"


def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    estimates: list[str] = []
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []  # what it prints is no part of the sources
        body = ast.parse("".join(cell["source"]))
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, str(NOTEBOOK), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
            if isinstance(value, Schedule | Timeline):
                shown.append(notebook.html(value))
            elif isinstance(value, EstimatedJob):
                estimates.append(notebook.estimate_html(value))
    assert len(shown) == 3
    assert all("srcdoc=" in page for page in shown)
    (estimate,) = estimates
    assert "stock 1F1B" in estimate and "torchrun" in estimate
    assert (tmp_path / "v-half.svg").stat().st_size > 1000


def test_a_kernel_gets_the_ways_to_show_them() -> None:
    """A stand-in for IPython: what it is handed is what it would call."""
    program = (
        "import sys, types\n"
        "ways = {}\n"
        "by_name = lambda *names: ways.__setitem__(names[:2], names[2])\n"
        "html = types.SimpleNamespace(for_type=ways.__setitem__, for_type_by_name=by_name)\n"
        "formatter = types.SimpleNamespace(formatters={'text/html': html})\n"
        "kernel = types.SimpleNamespace(display_formatter=formatter)\n"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: kernel)\n"
        "import megatron_pp_ext as pp\n"
        "pp.build\n"
        "print('megatron_pp_ext.planner' in sys.modules)\n"
        "name = pp.EstimatedJob.__module__, pp.EstimatedJob.__qualname__\n"
        "print(ways[pp.Schedule](pp.build('1f1b', 2, 3))[:15], pp.Timeline in ways, name in ways)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n<iframe srcdoc= True True\n"
