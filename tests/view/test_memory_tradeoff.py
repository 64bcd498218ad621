import re

import pytest

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
    comments = re.findall("<!-- (.*) -->", drawn(timelines, [], tmp_path))
    assert "a title" in comments
    assert comments.count("v-half") == comments.count("dualpipe-v") == 1


def test_schedules_at_one_point_share_a_label(timelines, tmp_path):
    assert "<!-- v-zb, interleaved-zb -->" in drawn(timelines, [], tmp_path)


def test_what_keeps_far_more_is_only_named(timelines, tmp_path):
    assert "<!-- further right: gpipe (16 microbatches, 57) -->" in drawn(timelines, [], tmp_path)


def test_compiled_schedules_are_a_line_of_their_own(timelines, tmp_path):
    assert memory_tradeoff._STEPS not in drawn(timelines, [], tmp_path)
    picture = drawn(timelines, [timelines["v-half"], timelines["v-zb"]], tmp_path)
    assert memory_tradeoff._STEPS in picture
    assert "flex, compiled for a limit" in picture


def test_labels_cover_neither_each_other_nor_points():
    assert memory_tradeoff._overlap((0, 0, 2, 2), (1, 1, 3, 3))
    assert not memory_tradeoff._overlap((0, 0, 2, 2), (2, 0, 3, 2))


def test_an_unknown_format_is_refused(timelines, tmp_path):
    with pytest.raises(ValueError, match="is no picture file"):
        memory_tradeoff.draw_schedules(timelines, [], 90, tmp_path / "a.txt", "")
