import re

import pytest
from matplotlib.transforms import Bbox

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.view import memory_tradeoff

NAMES = ("gpipe", "1f1b", "v-half", "v-zb", "interleaved-zb", "dualpipe-v")


@pytest.fixture(scope="module")
def timelines():
    halves = {name: catalog.build(name, 4, 16) for name in NAMES}
    return {name: simulate(built, Costs.unit(built.placement)) for name, built in halves.items()}


def drawn(timelines, compiled, tmp_path):
    memory_tradeoff.draw_schedules(timelines, compiled, 90, tmp_path / "a.svg", "a title")
    return (tmp_path / "a.svg").read_text()


def test_every_schedule_is_named_once(timelines, tmp_path):
    """Points at one place share a label, and what keeps far more is only named."""
    comments = re.findall("<!-- (.*) -->", picture := drawn(timelines, [], tmp_path))
    assert "a title" in comments
    assert comments.count("v-half") == comments.count("dualpipe-v") == 1
    assert "v-zb, interleaved-zb" in comments
    assert "further right: gpipe (16 microbatches, 57)" in comments
    assert memory_tradeoff._STEPS not in picture


def test_compiled_schedules_are_a_line_of_their_own(timelines, tmp_path):
    picture = drawn(timelines, [timelines["v-half"], timelines["v-zb"]], tmp_path)
    assert memory_tradeoff._STEPS in picture
    assert "flex, compiled for a limit" in picture


CROWD = [
    memory_tradeoff.Point(f"tp2-cp2-pp{n}-dp{n}-mb1-interleaved-uneven", 1e9 * memory, rate)
    for n, (memory, rate) in enumerate([(18, 554), (27, 601), (39, 611), (55, 631), (79.6, 639), (79.8, 640)])
]


@pytest.mark.parametrize("limit", [79.9, 90, 400])
def test_names_cover_nothing_and_are_not_cut(limit):
    """Frontier and best are the same points here, close together and close to the limit."""
    figure = memory_tradeoff._configurations(CROWD, CROWD, 1e9 * limit, "")
    (axes,) = figure.axes
    names = axes.texts
    boxes = {name.get_text(): name.get_window_extent() for name in names}
    assert set(boxes) == {point.name for point in CROWD}
    (line,) = [line for line in axes.lines if line.get_gid() == "limit"]
    others = {"limit": line.get_window_extent(), "legend": axes.get_legend().get_window_extent()}
    (points,) = axes.collections
    for point, (x, y) in zip(CROWD, axes.transData.transform(points.get_offsets()), strict=True):
        others[f"point of {point.name}"] = Bbox.from_bounds(x - 3, y - 3, 6, 6)
    for name, box in boxes.items():
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert [other for other, found in {**boxes, **others}.items() if box.overlaps(found)] == [name]
    assert not others["legend"].overlaps(others["limit"])


def test_an_unknown_format_is_refused(timelines, tmp_path):
    with pytest.raises(ValueError, match="is no picture file"):
        memory_tradeoff.draw_schedules(timelines, [], 90, tmp_path / "a.txt", "")
