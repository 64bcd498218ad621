import struct
import xml.etree.ElementTree as ET

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.view.colours import colour
from megatron_pp_ext.view.picture import draw


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


def test_titles_are_written(svg):
    assert "<!-- the first -->" in svg
    assert "<!-- the second -->" in svg


def test_every_action_has_its_box(svg):
    """A split schedule has one box an action; the legend adds one for each of the six colours."""
    for kind in "FIW":
        drawn = svg.count(f"fill: {colour(kind, 0)}")
        assert drawn == 3 * 4 + 3 * 4 + 1
        assert svg.count(f"fill: {colour(kind, 1)}") == 3 * 4 + 1


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
    with pytest.raises(ValueError, match="no timelines to draw"):
        draw({}, tmp_path / "a.png")
