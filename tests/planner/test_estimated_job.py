"""An estimate from Python: the words of ``mpp estimate``, in a line and in a notebook."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_pp_ext import estimate
from megatron_pp_ext.cli import app
from megatron_pp_ext.view import notebook
from tests.support.browser import BROWSER, drawn

FLAGS = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 4096 --seq-length 512 "
    "--padded-vocab-size 128000 --micro-batch-size 1 --global-batch-size 16 --bf16 "
    "--pipeline-model-parallel-size 4 "
)


def texts(html: str) -> str:
    """What a reader sees of ``html``, with single spaces."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--pipeline-schedule v-zb --pipeline-vocabulary auto", None),
        ("--pipeline-schedule gpipe", "warning: gpipe is predicted to take"),
        ("--apply-layernorm-1p", "a step may be other than estimated"),
    ],
)
def test_a_notebook_shows_what_the_command_prints(flags: str, warning: str | None) -> None:
    words = ["estimate", "--no-ask", "--world-size", "8", "--", *FLAGS.split(), *flags.split()]
    printed = " ".join(CliRunner(env={"COLUMNS": "400"}).invoke(app, words).output.split())
    shown = estimate(FLAGS + flags, gpus=8)
    html = texts(notebook.estimate_html(shown))
    lines = [shown.title, *shown.sizes, *shown.times, *shown.about_memory, *shown.warnings]
    lines += [*shown.about_command, *shown.command.split("\\\n")]
    assert "--train-iters" in shown.command and len(lines) >= 8
    for line in lines:
        line = " ".join(line.split())
        assert line in printed and line in html
    assert bool(shown.warnings) is (warning is not None)
    assert all(line.startswith(str(warning)) for line in shown.warnings)
    # Another step in three words there, and in a line here.
    for name, seconds, size in shown.alternatives[1:]:
        assert f"{name}: {seconds}, {size}" in printed and f"{name} {seconds} {size}" in html
    assert ("stock 1F1B" in html) is ("--pipeline-schedule" in flags)
    for name, row in shown.memory_table.items():
        assert re.search(rf"{name} +{' +'.join(row)}", printed)
        assert all(f" {cell} " in html for cell in row)


def test_its_line() -> None:
    shown = estimate(f"{FLAGS} --pipeline-schedule v-half", gpus=8)
    assert re.fullmatch(
        r"<Estimate of v-half on 8 x h100: step \S+ s, MFU \S+%, bubble \S+%, \S+ GB on the fullest rank>",
        repr(shown),
    )
    assert f"step {shown.step.step_seconds:.4g} s" in repr(shown)
    assert repr(shown.step) == f"<Estimate:{repr(shown).partition(':')[2]}"


def test_bars_end_where_the_memory_does() -> None:
    shown = estimate(f"{FLAGS} --pipeline-schedule v-half", gpus=4)
    html = notebook.estimate_html(shown)
    widths = [float(width) for width in re.findall(r"height:100%;width:([\d.]+)%", html)]
    totals = sum(rank.total for rank in shown.step.ranks)
    assert sum(widths) == pytest.approx(100 * totals / shown.device_bytes, abs=0.01)
    legend = re.findall(r"background:(#\w{6})\"></span> \w+", html)
    assert len(legend) == len(set(legend)) == len(shown.memory)


def test_names_of_a_file_are_text(tmp_path: Path) -> None:
    file = tmp_path / "<b>costs.json"
    file.write_text(
        json.dumps({"stages": [{"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}] * 4})
    )
    shown = estimate([*FLAGS.split(), "--pipeline-schedule", "zb-h1", "--pipeline-costs", str(file)], gpus=4)
    assert "<b>costs" in shown.step.grounds
    html = notebook.estimate_html(shown)
    assert "&lt;b&gt;costs" in html and "<b>costs" not in html


def test_what_is_assumed_is_noted() -> None:
    single = estimate(f"{FLAGS.replace('--bf16', '')} --pipeline-schedule v-half")
    assert "fp32" in " ".join(single.notes) and single.placed.gpus == 4
    assert "fp32" in texts(notebook.estimate_html(single))


@pytest.mark.parametrize(
    ("flags", "options", "fix"),
    [
        (FLAGS, {"gpus": 0}, "gpus is 0, but must be 1 or more"),
        (FLAGS, {"gpus": 6}, "nearest that work are 4 or 8"),
        ("", {"model": "llama3-7b"}, "did you mean"),
        (
            FLAGS.replace("--padded-vocab-size 128000", "--tokenizer-type GPT2BPETokenizer"),
            {},
            "--vocab-size",
        ),
        (FLAGS, {"system": "h1000"}, "give one of"),
    ],
)
def test_what_cannot_be_estimated_is_refused(flags: str, options: dict, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fix)) as error:
        estimate(flags, **options)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to show a page in")
def test_it_fits_a_narrow_cell(tmp_path: Path) -> None:
    shown = estimate(f"{FLAGS} --pipeline-schedule v-half", gpus=8)
    file = tmp_path / "cell.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{notebook.estimate_html(shown)}")
    boxes, wider = drawn(file, "span[title]", tmp_path, 500)
    assert wider <= 0
    (bars,) = boxes.values()
    assert len(bars) == 4 * len(shown.memory)
    assert len({top for _, top, _, _ in bars}) == 4, "a bar a rank"
