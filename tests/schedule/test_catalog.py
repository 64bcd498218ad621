"""The catalogue: its entries, its names, and entries of a user's own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.check import check, require_one_forward_order
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.entry import OTHERS, Abilities
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import simulate


@pytest.mark.parametrize("name", catalog.NAMES)
def test_an_entry_states_what_it_builds(name):
    entry = catalog.entry(name)
    schedule = catalog.build(name, 4, 8)
    assert schedule.name == entry.name == name
    assert schedule.placement == entry.placement(4)
    assert schedule.splits_backward is entry.splits_backward
    assert entry.paper
    assert entry.build(4, 8) == schedule
    assert catalog.build(name, 4, 8, entry.chunks) == schedule
    assert catalog.build(name, 4, 8) is schedule
    require_one_forward_order(schedule)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("zbh1", "did you mean 'zb-h1'"),
        ("V-Halfe", "did you mean 'v-half'"),
        ("flx", "did you mean 'flex'"),
        ("atuo", "did you mean 'auto'"),
        ("pipedraem", "did you mean 'pipedream'"),
        ("zbv-greedy-hlaf", "did you mean 'zbv-greedy-half'"),
        ("qqq", "no schedule is called 'qqq', choose one of: gpipe, 1f1b"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all_others(typed, said):
    with pytest.raises(ValueError, match=said) as error:
        catalog.build(typed, 4, 8)
    assert all(name in str(error.value) for name in catalog.NAMES)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Flex", "'flex' is not offered here: .* compile_schedule"), ("csv:my.csv", "read it by read_csv")],
)
def test_what_is_not_built_by_its_name_is_answered_with_what_makes_it(name, said):
    with pytest.raises(ValueError, match=said):
        catalog.build(name, 4, 8)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("V-Half", "v-half"),
        (" v_half ", "v-half"),
        ("1F1B", "1f1b"),
        ("ZBV", "v-zb"),
        ("ZBV_Greedy_Half", "v-half"),
        ("Flex", "flex"),
        ("AUTO", "auto"),
        ("PipeDream_2BW", "pipedream-2bw"),
        ("csv:Runs/My_Schedule.CSV", "csv:Runs/My_Schedule.CSV"),
        ("CSV:My_Schedule.csv", "csv:My_Schedule.csv"),
        ("V-Halfe", "V-Halfe"),
    ],
)
def test_one_name_for_every_spelling(typed, meant):
    assert catalog.canonical(typed) == meant
    assert catalog.canonical(meant) == meant
    if meant in catalog.NAMES:
        assert catalog.entry(typed) is catalog.entry(meant)


def test_chunks_that_cannot_be_built():
    with pytest.raises(ValueError, match=r"v-half got 3 chunk.* has 2: leave chunks out, or use interl"):
        catalog.build("v-half", 4, 8, 3)
    with pytest.raises(ValueError, match=r"interleaved got 1 chunk.* has 2 or more: .* or use 1f1b"):
        catalog.build("interleaved", 4, 8, 1)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_sizes_that_are_accepted(name):
    entry = catalog.entry(name)
    assert not entry.accepts(entry.chunks - 1)
    assert entry.accepts(entry.chunks)
    for chunks in (entry.chunks - 1, entry.chunks, entry.chunks + 1, entry.chunks + 2):
        if entry.accepts(chunks):
            assert catalog.build(name, 3, 4, chunks).placement == entry.placement(3, chunks)
            continue
        for refused in (entry.placement, lambda ranks, chunks, build=entry.build: build(ranks, 4, chunks)):
            with pytest.raises(ValueError, match=rf"{name} got {chunks} chunk.*has {entry.chunks_phrase}:"):
                refused(3, chunks)
    with pytest.raises(ValueError, match=rf"{name} got 1 rank.*at least 2: add ranks"):
        catalog.build(name, 1, 8)
    with pytest.raises(ValueError, match=rf"{name} got 0 microbatches.*at least 1"):
        catalog.build(name, 4, 0)


@pytest.fixture
def own(monkeypatch):
    """An entry that is not in the catalogue, which forgets it after the test."""
    monkeypatch.setattr(catalog, "ENTRIES", dict(catalog.ENTRIES))
    monkeypatch.setattr(catalog, "NAMES", catalog.NAMES)
    plain = catalog.entry("1f1b")
    return replace(plain, name="own", make=lambda p, m: replace(plain.build(p, m), name="own"))


def test_an_entry_of_a_user_joins_the_catalogue(own):
    catalog.register(own)
    assert catalog.NAMES[-1] == "own"
    assert catalog.entry("own") is own
    assert catalog.build("own", 2, 3).orders == catalog.build("1f1b", 2, 3).orders


GIVEN = ("zb-h1", "zbv", "flex", "auto", "pipedream", "none")
CONTRADICTION = r"the entry of '\w+' states .*, but builds .*: correct one of them"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"name": name}, f"a schedule is called '{name}' already: choose another") for name in GIVEN),
        ({"name": "My_Own"}, "lower case with hyphens: call it 'my-own'"),
        ({"name": "other"}, CONTRADICTION),
        ({"splits_backward": True}, CONTRADICTION),
        ({"chunks": 2, "shape": "v"}, CONTRADICTION),
    ],
)
def test_an_entry_that_cannot_join_is_refused(own, wrong, message):
    with pytest.raises(ValueError, match=message):
        catalog.register(replace(own, **wrong))
    assert "own" not in catalog.NAMES


@pytest.mark.parametrize("p", [2, 3, 8])
def test_forward_only(p):
    for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1):
        for placement in (linear(p), loop(p, 2), loop(p, 3), v(p), wave(p, 4)):
            schedule = catalog.forward_only(placement, m)
            check(schedule)
            assert all(a.kind is Kind.F for a in schedule)
            makespan = simulate(schedule, Costs.unit(placement)).makespan
            if placement.chunks == 1:
                assert makespan == m + p - 1
            if placement == v(p):
                # The last rank cannot start before p - 1 nor end later than p - 1 before the end.
                assert makespan == max(2 * m + 2 * (p - 1), 2 * p + m - 1)
            if placement == loop(p, 2) and m % p == 0:
                assert makespan == 2 * m + p - 1


@pytest.mark.parametrize("p", [2, 3, 8])
def test_forward_only_admits_no_more_than_the_v_holds(p):
    """Activations wait between the chunks of a rank; many microbatches must not mean many of them."""
    schedule = catalog.forward_only(v(p), 6 * p)
    between = [0]
    for action in schedule.orders[0]:
        between.append(between[-1] + (1 if action.stage == 0 else -1))
    assert max(between) == 2 * p - 1


def test_abilities_are_those_of_the_entry_or_of_the_name_beside_the_catalogue() -> None:
    for name, entry in catalog.ENTRIES.items():
        can = catalog.abilities(name)
        assert can == Abilities(entry.splits_backward, entry.make_paired is not None)
    assert catalog.abilities("csv:a/b.csv").file == Path("a/b.csv")
    endless = {other.name for other in OTHERS if not catalog.abilities(other.name).flushes}
    assert endless == {"pipedream", "pipedream-2bw"}
    assert all(catalog.abilities(name).order in catalog.NAMES for name in endless)
    assert catalog.abilities(None) == catalog.abilities("no such schedule") == Abilities()


def test_a_package_brings_schedules_and_a_broken_one_is_left_out(tmp_path):
    information = tmp_path / "my_schedules-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-schedules\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[megatron_pp_ext.schedules]\nall-forwards = my_schedules:ENTRY\nbroken = my_schedules:NOTHING\n"
    )
    (tmp_path / "my_schedules.py").write_text(
        "from dataclasses import replace\n"
        "from megatron_pp_ext.schedule import catalog\n"
        "from megatron_pp_ext.schedule.families import gpipe\n"
        "def build(ranks, microbatches):\n"
        "    return replace(gpipe.build(ranks, microbatches), name='all-forwards')\n"
        "ENTRY = replace(catalog.ENTRIES['gpipe'], name='all-forwards', make=build)\n"
    )
    program = "from megatron_pp_ext import build; print(build('all-forwards', 2, 3).name)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all-forwards\n", done.stderr
    assert "schedule 'broken' of my-schedules is left out (AttributeError" in done.stderr
