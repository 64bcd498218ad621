import pytest
from rich.console import Console

from megatron_pp_ext.features.offload.copies import with_share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.view.terminal import Sketch, summary_table


def timed(name, p, m, **costs):
    schedule = catalog.build(name, p, m)
    placement = schedule.placement
    return simulate(schedule, Costs.uniform(placement, **costs) if costs else Costs.unit(placement))


def printed(what, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


def test_a_sketch_shows_each_action_in_its_place():
    assert printed(Sketch(timed("zb-h1", 2, 2))).splitlines() == [
        "0 FF·IWIW",
        "1 ·FIFIWW",
        "  1 column = 1, makespan 7",
    ]
    whole = timed("1f1b", 2, 1, forward=1, input_gradient=1, weight_gradient=1)
    assert printed(Sketch(whole)).splitlines()[:2] == ["0 F···BB", "1 ·FBB··"]


def test_a_long_schedule_fits_the_width():
    lines = printed(Sketch(timed("v-min", 4, 64)), width=60).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 60
    assert "makespan 395" in lines[-2]
    assert lines[-1].strip() == "some actions, of 1, are not shown: see --html FILE"


def test_a_schedule_that_is_too_wide_goes_on_below():
    """Its parts are those of a wide console's lines, and nothing is left out."""
    timeline = timed("v-half", 4, 16)
    wide, narrow = (printed(Sketch(timeline), width).splitlines() for width in (300, 60))
    whole = [line.partition(" ")[2] for line in wide[:4]]
    assert len(whole[0]) > 58
    parts = [line for line in narrow if line[0].isdigit()]
    for rank in range(4):
        assert "".join(line.partition(" ")[2] for line in parts[rank::4]) == whole[rank]
    assert sum("the same from" in line for line in narrow) == len(parts) // 4 - 1
    assert max(map(len, narrow)) <= 60


def test_eighty_columns_cut_no_number():
    unit = {"forward": 0.01234567, "input_gradient": 0.01, "weight_gradient": 0.01}
    lines = printed(summary_table({name: timed(name, 8, 8, **unit) for name in catalog.NAMES}), width=80)
    assert "…" not in lines
    assert max(map(len, lines.splitlines())) <= 80
    assert all(f"│ {name} " in lines for name in catalog.NAMES)


@pytest.mark.parametrize("width", [30, 45, 60])
def test_narrow_consoles_get_all_names_and_numbers(width):
    timelines = {name: timed(name, 4, 8) for name in catalog.NAMES}
    lines = printed(summary_table(timelines), width).splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    cells = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    shown: dict[str, list[str]] = {}
    for name, *numbers in cells:
        shown.setdefault(name.strip(), []).extend(map(str.strip, numbers))
    wide = [line.strip("│").split("│") for line in printed(summary_table(timelines), 100).splitlines()]
    assert shown == {name.strip(): [*map(str.strip, numbers)] for name, *numbers in wide if numbers}


def test_of_many_ranks_both_ends_are_shown():
    lines = printed(Sketch(timed("1f1b", 70, 2))).splitlines()
    assert len(lines) == 32 + 1 + 32 + 2
    assert lines[32].strip() == "ranks 32 to 37 are not shown"
    assert lines[33].startswith("38 ")


def test_the_table_tells_makespan_from_span():
    lines = printed(summary_table({"ours": timed("v-zb", 4, 8), "plain": timed("1f1b", 4, 8)})).splitlines()
    for row in ("ours 51 5.9% 48 0.0% 4 8", "plain 33 27.3% 33 27.3% 4 7"):
        (line,) = (line for line in lines if row.split()[0] in line)
        assert [cell.strip() for cell in line.split("│")[1:-1]] == row.split()
    recorded = printed(summary_table({"ours": timed("v-zb", 4, 8)}, with_messages=False))
    assert "messages" not in recorded


def test_a_sketch_has_the_copies_of_each_rank_below_it():
    """A column is an F long, and a copy a fifth of it."""
    schedule = catalog.build("1f1b", 2, 4)
    timeline = with_share(schedule, Costs.per_rank(2).copied_at(0.2), 0.5)
    lines = printed(Sketch(timeline)).splitlines()
    assert len(lines) == 3 * 2 + 1
    assert lines[1].count("↓") == lines[2].count("↑") == len(timeline.copies[0]) > 0
