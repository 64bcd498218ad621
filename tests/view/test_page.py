"""The page of schedules: what is in it, and how it behaves in a browser."""

import json
import re
from pathlib import Path

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.pairs.order import request_in_pairs
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import delivers, needs
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.simulate import Timeline, simulate
from megatron_pp_ext.view import notebook, page
from tests.support.browser import ANSWER, BROWSER, asked


def timeline(name: str, ranks: int = 4, microbatches: int = 8) -> Timeline:
    return simulate(catalog.build(name, ranks, microbatches))


def content(text: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "v-half", "dualpipe-v"])
def test_it_has_every_action_and_what_it_needs(name: str) -> None:
    shown = timeline(name)
    (panel,) = content(page.text({name: shown}))["panels"]
    assert panel["title"] == name
    for rank, (events, rows) in enumerate(zip(shown.events, panel["events"], strict=True)):
        for (action, start, end), row in zip(events, rows, strict=True):
            _, _, _, begins, ends, waits, _, about = row
            assert (begins + shown.start, ends + shown.start) == pytest.approx((start, end))
            assert about == f"{action.kind} of {action.microbatch} through stage {action.stage}"
            needed = {delivers(shown.events[other][place].action) for other, place in waits}
            assert needed == set(needs(action, shown.schedule.placement)), (rank, action)
        peak = max(amount for _, amount in panel["memory"][rank])
        assert peak == pytest.approx(shown.peak_activations[rank])


def test_pairs_are_halves_of_a_row() -> None:
    costs = CostModel.fixed(Costs.per_rank(4, 2))
    request = request_in_pairs(named("dualpipe-v", 4, 8))
    shown = simulate(make(request, costs).schedule)
    (panel,) = content(page.text({"pairs": shown}))["panels"]
    halves = [row[6] for rows in panel["events"] for row in rows]
    assert halves.count(1) == halves.count(2) == len(shown.schedule.paired) > 0


def test_names_cannot_leave_their_place() -> None:
    text = page.text({"</script><b>": timeline("1f1b")}, time_unit="<i>")
    assert "<b>" not in re.sub(r"<script type=.*?</script>", "", text, flags=re.DOTALL)
    assert "(&lt;i&gt;)" in text
    assert content(text)["panels"][0]["title"] == "</script><b>"


def test_it_asks_for_nothing_from_a_network() -> None:
    text = page.text({"1f1b": timeline("1f1b")})
    assert re.findall(r"""(?:src|href)=|https?://|@import|url\(""", text) == []


def test_a_notebook_shows_what_a_terminal_shows_in_a_line() -> None:
    schedule = catalog.build("v-half", 4, 8)
    assert repr(schedule) == "<Schedule v-half: 4 ranks, 8 microbatches, 192 actions>"
    assert repr(simulate(schedule)).startswith("<Timeline of v-half: 4 ranks, 8 microbatches, makespan 26.5,")
    assert notebook.html(schedule) == notebook.html(simulate(schedule))
    assert "srcdoc=" in notebook.html(schedule)


_USE = (
    """<script>
const panel = panels[0], {canvas, about} = panel;
const press = (key, shiftKey = false) =>
  canvas.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, cancelable: true}));
const said = {};
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const colour = (_, place) => pixels.slice(4 * place, 4 * place + 3).join();
said.colours = new Set(Array.from({length: pixels.length / 4}, colour)).size;
press("ArrowRight"); said.first = about.textContent;
press("ArrowDown"); said.below = about.textContent;
press("+"); said.zoomed = to - from;
press("ArrowRight", true); said.moved = from;
press("0"); said.everything = [from, to];
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, cancelable: true})); said.wheel = to - from;
press("0");
const at = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: at.left + 32, clientY: at.top + 5}));
said.hovered = about.textContent;
const {scrollWidth, clientWidth} = document.documentElement;
said.wider = scrollWidth - clientWidth;
said.tops = panels.map(panel => panel.canvas.getBoundingClientRect().top);
"""
    + ANSWER % "said"
    + "</script>"
)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to show a page in")
@pytest.mark.parametrize("width", [400, 1400])
def test_it_zooms_moves_and_answers(width: int, tmp_path: Path) -> None:
    both = {"1f1b": timeline("1f1b"), "v-half": timeline("v-half")}
    page.write(both, tmp_path / "page.html")
    said = asked(tmp_path / "page.html", _USE, tmp_path, width)
    longest = max(each.makespan for each in both.values())
    assert said["colours"] > 5
    assert said["first"].startswith("F of 0 through stage 0 on rank 0: 0 to 1.")
    assert said["below"].startswith(
        "F of 0 through stage 1 on rank 1: 1 to 2. It needs F of 0 through stage 0"
    )
    assert "The rank is idle for 1 before it" in said["below"]
    assert said["zoomed"] == pytest.approx(0.8 * longest)
    assert said["moved"] > 0
    assert said["everything"] == [0, longest]
    assert said["wheel"] < longest
    assert said["hovered"].startswith("F of 0 through stage 0")
    assert said["wider"] <= 0
    assert (said["tops"][0] == said["tops"][1]) is (width == 1400)  # side by side where there is room
