import struct
import xml.etree.ElementTree as ET

import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from megatron_pp_ext.features.offload.copies import with_share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.view import picture
from megatron_pp_ext.view.colours import COPIES, colour, ink
from megatron_pp_ext.view.picture import _CEILING, _FLOOR, _draw_memory, draw, draw_groups


def timed(name, p=3, m=4):
    schedule = catalog.build(name, p, m)
    return simulate(schedule, Costs.unit(schedule.placement))


@pytest.fixture(scope="module")
def svg(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "two.svg"
    draw({"the first": timed("zb-h1"), "the second": timed("v-half")}, path)
    return path.read_text()


def test_svg_is_well_formed_and_has_the_colours_of_both_chunks(svg):
    ET.fromstring(svg)
    for kind in "FIW":
        for chunk in (0, 1):
            assert colour(kind, chunk) in svg
    assert colour("F", 2) not in svg


def test_every_schedule_of_the_catalogue_is_drawn(tmp_path):
    draw({name: timed(name, 2, 2) for name in catalog.NAMES}, tmp_path / "all.svg")
    assert all(f"<!-- {name} -->" in (tmp_path / "all.svg").read_text() for name in catalog.NAMES)


def test_copies_are_drawn_where_there_are_any(svg, tmp_path):
    schedule = catalog.build("v-half", 3, 4)
    timeline = with_share(schedule, Costs.per_rank(3, 2).copied_at(0.5), 1.0)
    draw({"copies": timeline}, tmp_path / "copies.svg")
    drawn = (tmp_path / "copies.svg").read_text()
    for way, code in COPIES.items():
        assert code in drawn and code not in svg, way


def test_titles_sizes_and_the_unit_are_written(svg, tmp_path):
    assert "<!-- the first -->" in svg and "<!-- the second -->" in svg
    assert svg.count("<!-- 3 ranks, 4 microbatches   makespan ") == 2
    assert "<!-- time -->" in svg
    draw({"1f1b": timed("1f1b")}, tmp_path / "a.svg", "weeks")
    assert "<!-- time (weeks) -->" in (tmp_path / "a.svg").read_text()


def test_every_action_has_its_box_and_its_number(svg):
    """The legend adds a box for each kind and each chunk.

    Numbers are black on chunk 0 and white on chunk 1, which only the second panel has.
    """
    for kind in "FIW":
        assert svg.count(f"fill: {colour(kind, 0)}") == 3 * 4 + 3 * 4 + 1
        assert svg.count(f"fill: {colour(kind, 1)}") == 3 * 4 + (kind == "F")
    backgrounds = 3
    assert svg.count(f"fill: {ink(0)}") == 2 * 3 * 3 * 4
    assert svg.count(f"fill: {ink(1)}") == 3 * 3 * 4 + backgrounds


def test_every_action_has_a_tooltip_over_its_box(tmp_path):
    """Also where boxes are too narrow for numbers; W of microbatch 15 ends the step in the last column."""
    timeline = timed("zb-h1", 3, 16)
    draw({"a": timeline}, tmp_path / "a.svg")
    drawn = ET.fromstring((tmp_path / "a.svg").read_text())
    ((*boxes,),) = (group for group in drawn.iter() if group.get("id") == "tooltips")
    assert len(boxes) == sum(map(len, timeline.events))
    titles = {box[0].text: box for box in boxes}
    first, last = titles["0F0 on rank 0: 0 to 1"], titles["2W15 on rank 2: 49 to 50"]
    width, left = (float(first.get(name)) for name in ("width", "x"))
    assert float(last.get("x")) == pytest.approx(left + 49 * width, abs=0.5)
    assert float(last.get("y")) - float(first.get("y")) == pytest.approx(2 * 72 * picture._ROW, abs=0.02)


def test_too_narrow_boxes_stay_without_numbers(tmp_path):
    draw({"long": timed("v-min", 2, 200)}, tmp_path / "long.svg")
    assert f"fill: {ink(0)}" not in (tmp_path / "long.svg").read_text()


def test_the_memory_curve_follows_the_timeline():
    """Rank 0 of 1F1B keeps 2 microbatches, rank 1 one; the curve is as high as that."""
    timeline = timed("1f1b", 2, 4)
    axes = Figure().add_subplot()
    axes.set_xlim(0, 10 * timeline.makespan)
    _draw_memory(axes, timeline, most=2)
    (curves,) = (c for c in axes.collections if isinstance(c, LineCollection))
    highest = [min(y for _, y in path) for path in curves.get_segments()]
    assert highest == pytest.approx([_CEILING, 1 + (_CEILING + _FLOOR) / 2])
    for rank, path in enumerate(curves.get_segments()):
        assert tuple(path[0]) == (0, rank + _FLOOR)
        assert tuple(path[-1]) == (timeline.makespan, rank + _FLOOR)
    # Rank 1 gives back and takes again at the same moment, three times: no spikes.
    inside = {y for x, y in curves.get_segments()[1] if 1 < x < 13}
    assert inside <= {highest[1]}
    assert [text.get_text() for text in axes.texts] == ["2", "1"]
    assert {text.xy[0] for text in axes.texts} == {timeline.makespan}


def test_png_has_the_size_of_the_longest_schedule(tmp_path):
    def size(microbatches):
        path = tmp_path / f"{microbatches}.png"
        draw({"1f1b": timed("1f1b", 2, microbatches)}, path)
        return struct.unpack(">II", path.read_bytes()[16:24])

    assert size(30)[0] > size(2)[0]
    assert size(30)[1] == size(2)[1]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"end its name in one of \.svg, \.png"):
        draw({"1f1b": timed("1f1b")}, tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"300 ranks with 600 actions do not fit .*: draw fewer ranks"):
        draw({"1f1b": timed("1f1b", 300, 1)}, tmp_path / "a.png")
    with pytest.raises(ValueError, match="no timelines to draw"):
        draw({}, tmp_path / "a.png")


def test_each_group_has_its_own_time_axis(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(picture, "save", lambda figure, path, over: drawn.append(figure))
    long, short = timed("1f1b", 2, 20), timed("1f1b", 2, 4)
    draw_groups([{"long": long, "beside": short}, {"alone": short}], tmp_path / "a.svg", "seconds")
    axes = drawn[0].axes
    assert [panel.get_xlim()[1] for panel in axes] == [long.makespan, long.makespan, short.makespan]
    assert [panel.get_xlabel() for panel in axes] == ["", "time (seconds)", "time (seconds)"]
