import json
import os
import re
import subprocess
import sys

import pytest

from megatron_pp_ext import __version__
from megatron_pp_ext.cli import flex, report
from megatron_pp_ext.cli.flex import undominated
from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import Made
from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.entry import ALIASES
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import FIRST, LAST, v
from megatron_pp_ext.schedule.simulate import simulate

KEYS = (
    "schedule ranks microbatches chunks makespan span bubble bubble_span peak_activation peak_messages "
    "lower_bound pairs copies digest time_unit"
)


def test_list_has_every_schedule_and_alias(mpp):
    output, updates = mpp("list").output, ("pipedream", "pipedream-2bw")
    for name in (*catalog.NAMES, *ALIASES, *updates, "flex", "auto", "csv:FILE"):
        assert name in output


def test_help_without_arguments(mpp):
    result = mpp()
    assert result.exit_code == 0
    assert "schedule  " in result.output


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("v-half", None), ("interleaved", 3)])
def test_schedule_writes_what_it_shows(name, chunks, mpp, tmp_path):
    words = ("-p", 3, "-m", 5, *(("--chunks", chunks) if chunks else ()))
    result = mpp("schedule", name, *words, "--csv", tmp_path / "a.csv", "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    built = catalog.build(name, 3, 5, chunks)
    expected = simulate(built, Costs.per_rank(3, built.placement.chunks))
    assert csv_file.read(tmp_path / "a.csv").orders == built.orders
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert list(numbers) == KEYS.split()
    assert numbers["schedule"] == name
    assert (numbers["ranks"], numbers["microbatches"]) == (3, 5)
    assert numbers["chunks"] == built.placement.chunks
    for key in ("makespan", "span", "bubble", "bubble_span"):
        assert numbers[key] == getattr(expected, key)
    assert numbers["peak_activation"] == list(expected.peak_microbatches)
    assert numbers["peak_messages"] == list(expected.peak_messages)
    assert f"messages waiting: at most {max(expected.peak_messages)} on a rank" in result.output
    assert 0.5 * expected.makespan < numbers["lower_bound"] <= expected.makespan
    assert numbers["digest"] == built.digest
    assert f"{expected.makespan:.5g}" in result.output


def test_a_v_is_shown_with_its_loss_on_either_rank(mpp, tmp_path):
    """The rows of one are those of the other, from the last to the first."""
    rows = {}
    for rank in (FIRST, LAST):
        file = tmp_path / f"{rank}.csv"
        result = mpp("schedule", "v-half", "-p", 3, "-m", 5, "--loss-rank", rank, "--csv", file)
        assert result.exit_code == 0, result.output
        assert csv_file.read(file).placement == v(3).with_loss_on(rank)
        rows[rank] = file.read_text().splitlines()
    assert rows[LAST] == rows[FIRST][::-1]
    for words, message in (
        (["v-half", "--loss-rank", "middle"], "--loss-rank is 'middle'; give 'first' or 'last'"),
        (["zb-h1", "--loss-rank", FIRST], "zb-h1 has the loss on the last rank; leave --loss-rank out"),
    ):
        assert message in mpp("schedule", *words).output


def test_a_vocabulary_that_all_ranks_share(mpp, tmp_path):
    options = ["-p", 3, "-m", 5, "--output-layer", 1.5, "--hop", 0.25]
    numbers = {}
    for name, more in (("last", []), ("shared", ["--shared-vocabulary", "--csv", tmp_path / "a.csv"])):
        result = mpp("schedule", "zb-h1", *options, *more, "--json", tmp_path / f"{name}.json")
        assert result.exit_code == 0, result.output
        numbers[name] = json.loads((tmp_path / f"{name}.json").read_text())["makespan"]
    schedule = share(lambda count: catalog.build("zb-h1", 3, count), 5)
    vocabulary = HeadCosts(1.0, 0.5, hidden=0.25, sums=0.5)
    costs = Costs((StageCosts(1, 1, 1),) * 3, 0.25, head=vocabulary)
    assert numbers["shared"] == pytest.approx(simulate(schedule, costs).makespan)
    assert numbers["shared"] < numbers["last"]
    last = Costs((StageCosts(1, 1, 1),) * 2 + (StageCosts(2.5, 2.5, 2.5),), 0.25)
    assert numbers["last"] == pytest.approx(simulate(catalog.build("zb-h1", 3, 5), last).makespan)
    assert csv_file.read(tmp_path / "a.csv").orders == schedule.orders
    from_file = mpp("simulate", tmp_path / "a.csv", "--output-layer", 1.5, "--hop", 0.25)
    assert f"{numbers['shared']:.5g}" in from_file.output


def test_compare_has_a_row_for_a_shared_vocabulary(mpp, short_searches):
    result = mpp("compare", "-p", 2, "-m", 2, "--output-layer", 1)
    assert result.exit_code == 0, result.output
    assert "v-zb +S" in result.output and "+S: all ranks share the output layer" in result.output


@pytest.mark.parametrize(("name", "typed"), [("v-half", "V_Half"), ("v-zb", "zbv"), ("flex", "FLEX")])
def test_a_name_may_be_spelled_otherwise(name, typed, mpp, tmp_path):
    limit = ("--memory-limit", 1, "--trials", 1) if name == "flex" else ()
    assert numbers_of(mpp, tmp_path, "schedule", typed, *limit, "-m", 4)["schedule"] == name


def numbers_of(mpp, folder, *words):
    result = mpp(*words, "--json", folder / "a.json")
    assert result.exit_code == 0, result.output
    return json.loads((folder / "a.json").read_text())


def test_all_times_are_a_whole_ranks(mpp, tmp_path):
    """The papers' makespans for p = 4, m = 8 are 3 (m + p - 1) ranks' and 6 m + 3 p - 7 chunks' units."""
    whole = {name: numbers_of(mpp, tmp_path, "schedule", name) for name in ("1f1b", "v-half")}
    assert [numbers["makespan"] for numbers in whole.values()] == [33, 26.5]
    assert whole["v-half"]["lower_bound"] == 26.5
    assert max(whole["v-half"]["peak_activation"]) == 3
    chunks = numbers_of(mpp, tmp_path, "schedule", "v-half", "--chunk-units")
    assert chunks["makespan"] == chunks["lower_bound"] == 53
    assert max(chunks["peak_activation"]) == 3
    assert [whole["v-half"]["time_unit"], chunks["time_unit"]] == [
        "1 = a rank's F, I or W of one microbatch",
        "1 = a chunk's F, I or W of one microbatch",
    ]


def test_given_times_are_a_whole_ranks(mpp, tmp_path):
    """One microbatch passes all chunks both ways and 12 links; the last W ends it on the first rank."""
    flags = ("-m", 1, "--f", 2, "--i", 4, "--w", 6, "--hop", 1)
    for more, (f, i, w) in (((), (1, 2, 3)), (("--chunk-units",), (2, 4, 6))):
        numbers = numbers_of(mpp, tmp_path, "schedule", "v-half", *flags, *more)
        assert numbers["makespan"] == 8 * (f + i) + w + 12
        assert numbers["time_unit"].startswith("the unit of --f, --i and --w")


def test_units_are_said_and_shared(mpp, tmp_path):
    unit = "times: 1 = a rank's F, I or W of one microbatch"
    csv = tmp_path / "a.csv"
    assert unit in mpp("schedule", "v-half", "-m", 4, "--csv", csv, "--svg", tmp_path / "a.svg").output
    assert unit in mpp("simulate", csv).output
    assert unit in mpp("schedule", "flex", "-m", 4, "--memory-limit", 1, "--trials", 0).output
    assert "<!-- time (1 = a rank's F, I or W of one microbatch) -->" in (tmp_path / "a.svg").read_text()
    assert "<!-- 4 ranks, 4 microbatches   makespan 14.5" in (tmp_path / "a.svg").read_text()


def test_cost_flags_reach_the_simulator(mpp, tmp_path):
    flags = ("-p", 2, "-m", 1, "--f", 2, "--i", 3, "--w", 5, "--hop", 7)
    # F, hop, F, I, hop, I, W.
    assert numbers_of(mpp, tmp_path, "schedule", "zb-h1", *flags)["makespan"] == 2 + 7 + 2 + 3 + 7 + 3 + 5


def test_a_costs_file_reaches_the_simulator(mpp, tmp_path):
    stages = [{"forward": n, "input_gradient": n, "weight_gradient": n, "activation": n} for n in (1, 2)]
    (tmp_path / "costs.json").write_text(json.dumps({"hop": 10, "stages": stages}))
    flags = ("-p", 2, "-m", 1, "--costs", tmp_path / "costs.json")
    numbers = numbers_of(mpp, tmp_path, "schedule", "1f1b", *flags)
    assert numbers["makespan"] == 1 + 10 + 2 + 4 + 10 + 2
    assert numbers["peak_activation"] == [1, 1]


def test_an_amount_is_in_whole_microbatches(mpp, tmp_path):
    """Ten ranks under 1F1B keep ten; nine is no fraction, and would be far too little in chunks."""
    flags = ("-p", 10, "-m", 10, "--memory-limit", 9, "--trials", 0)
    assert 4.5 < max(numbers_of(mpp, tmp_path, "schedule", "flex", *flags)["peak_activation"]) <= 9
    peaks = numbers_of(mpp, tmp_path, "schedule", "flex", *flags, "--chunk-units")["peak_activation"]
    assert max(peaks) <= 4.5


def test_simulate_reads_what_schedule_wrote(mpp, tmp_path):
    flags = ("--w", 0.5, "--hop", 0.1)
    mpp("schedule", "v-half", *flags, "--csv", tmp_path / "v-half.csv", "--json", tmp_path / "built.json")
    result = mpp("simulate", tmp_path / "v-half.csv", *flags, "--json", tmp_path / "read.json")
    assert result.exit_code == 0
    assert (tmp_path / "read.json").read_text() == (tmp_path / "built.json").read_text()


def test_pictures_and_trace(mpp, tmp_path):
    outputs = {flag: tmp_path / f"a.{flag}" for flag in ("png", "svg", "trace")}
    flags = [text for flag, path in outputs.items() for text in (f"--{flag}", path)]
    assert mpp("schedule", "v-min", "-p", 2, "-m", 2, *flags).exit_code == 0
    assert outputs["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in outputs["svg"].read_text()
    about = json.loads(outputs["trace"].read_text())["otherData"]
    assert about["pipeline"]["schedule"] == "v-min"
    assert (
        about["simulated"]["makespan"]
        == simulate(catalog.build("v-min", 2, 2), Costs.per_rank(2, 2)).makespan
    )


def test_the_version(mpp):
    assert mpp("--version").output == f"megatron_pp_ext {__version__}\n"


@pytest.mark.parametrize(
    "line",
    [
        "list",
        "schedule v-half -p 8 -m 16",
        "schedule interleaved-zb -p 8 -m 8 --f 12345.678",
        "schedule 1f1b -p 100 -m 4",
    ],
)
def test_eighty_columns_cut_nothing(line, mpp, monkeypatch):
    monkeypatch.setattr(report.console, "width", 80)
    lines = mpp(*line.split()).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    if line == "list":
        assert all(any(f"│ {name} " in row for row in lines) for name in (*catalog.NAMES, "flex", "auto"))


def test_what_would_take_hours_is_refused_at_once(mpp):
    refused = mpp("schedule", "gpipe", "-p", 1000, "-m", 100_000)
    assert refused.exit_code == 2
    assert "200,000,000 actions, but at most 2,000,000" in refused.stderr
    assert "give 1,000 microbatches or fewer ranks" in refused.stderr
    for line in ("compare -p 1000 -m 100000", "schedule flex -p 1000 -m 100000 --memory-limit 1"):
        assert "actions, but at most 2,000,000" in mpp(*line.split()).stderr
    assert "do not fit into a picture" in mpp("schedule", "1f1b", "-p", 300, "-m", 1, "--png", "a.png").stderr


def test_flex_keeps_its_limit(mpp, tmp_path, short_searches):
    for limit, peak in ((0.75, 3), (1, 4)):
        flags = ("-p", 4, "-m", 4, "--memory-limit", limit, "--json", tmp_path / "a.json")
        result = mpp("schedule", "flex", *flags)
        assert result.exit_code == 0, result.output
        assert "found by: " in result.output
        numbers = json.loads((tmp_path / "a.json").read_text())
        assert numbers["schedule"] == "flex"
        assert max(numbers["peak_activation"]) <= peak
        assert numbers["lower_bound"] <= numbers["makespan"]
        family = catalog.build("v-half" if limit < 1 else "v-zb", 4, 4)
        assert numbers["makespan"] <= simulate(family, Costs.unit(family.placement)).makespan


def test_an_amount_holds_messages_and_a_fraction_does_not(mpp, tmp_path):
    """Half of 1F1B's activations are four chunks of 100; into 400 these do not fit with their messages."""
    stage = {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 100}
    (tmp_path / "costs.json").write_text(json.dumps({"message": 5, "stages": [stage] * 8}))
    words = ("schedule", "flex", "-p", 4, "-m", 8, "--costs", tmp_path / "costs.json", "--trials", 20)
    for limit, peak in ((0.5, 2), (400, 1.5)):
        numbers = numbers_of(mpp, tmp_path, *words, "--memory-limit", limit)
        assert max(numbers["peak_activation"]) == peak
        assert max(numbers["peak_messages"]) >= 6


def test_compare_has_all_schedules_of_one_or_two_chunks_for_the_same_work(
    mpp, short_searches, tmp_path, monkeypatch
):
    monkeypatch.setattr(report.console, "width", 80)
    result = mpp("compare", "-p", 2, "-m", 4, "--png", tmp_path / "a.png", "--svg", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    rows = {
        cells[0].strip(): float(cells[1])
        for line in result.output.splitlines()
        if len(cells := line.strip("│").split("│")) == 7 and re.fullmatch(r" *[\d.]+ *", cells[1])
    }
    assert {name for name, entry in catalog.ENTRIES.items() if entry.chunks <= 2} <= set(rows)
    assert "+S" not in result.output
    assert "…" not in result.output
    # 3 (m + p - 1) whole ranks' units, and 6 m + p - 1 halves.
    assert rows["1f1b"] == 15
    assert rows["v-zb"] == 12.5
    assert min(makespan for name, makespan in rows.items() if name.startswith("flex")) <= 12.5
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a.svg").read_text()
    assert "<!-- 2 ranks, 4 microbatches -->" in drawn
    assert "<!-- makespan (1 = a rank's F, I or W of one microbatch) -->" in drawn
    assert "<!-- v-half" in drawn or ", v-half" in drawn


def test_compare_shows_what_it_knows_before_it_compiles(mpp, monkeypatch):
    def stopped(*_):
        raise ValueError("stopped while compiling")

    monkeypatch.setattr(flex, "some_limits", stopped)
    result = mpp("compare", "-p", 2, "-m", 4)
    assert result.stderr == "mpp: stopped while compiling\n"
    assert all(f"│ {name} " in result.stdout for name in ("1f1b", "v-half", "dualpipe-v"))


def test_a_frontier_leaves_out_what_another_beats():
    timelines = [
        simulate(built, Costs.unit(built.placement))
        for built in (
            catalog.build(name, 4, 8) for name in ("interleaved", "v-zb", "v-min", "1f1b-v", "v-half")
        )
    ]
    assert [line.schedule.name for line in undominated(timelines)] == ["v-min", "v-half", "v-zb"]


def test_flex_without_trials_is_a_published_schedule(mpp):
    line = "schedule flex -p 4 -m 8 --memory-limit 0.5 --f 10 --i 11 --w 7 --hop 1"
    assert "found by: published" in mpp(*line.split(), "--trials", "0").output
    assert "found by: published" not in mpp(*line.split(), "--trials", "40").output


def test_activations_on_the_host(mpp, tmp_path, short_searches):
    """Half of V-Half's leave for nothing; the numbers have every copy."""
    words = ("schedule", "v-half", "-p", 3, "-m", 6, "--offload", 0.5, "--copy", 0.3)
    result = mpp(*words, "--json", tmp_path / "a.json")
    assert "on the host: 50.0% of activations; peak memory " in result.output
    assert "↓" in result.output and "↑" in result.output
    copies = json.loads((tmp_path / "a.json").read_text())["copies"]
    assert len(copies) == 18 and set(copies[0]) == {"stage", "microbatch", "back_before"}
    assert mpp("compare", "-p", 2, "-m", 2, "--offload", "auto", "--copy", 0.1).output.count("+H") > 12
    whole = mpp("schedule", "v-half", "-p", 8, "-m", 32, "--offload", 1, "--copy", 1).output
    # A bound of orders that keep as little on the device without copies would be above this step.
    assert "(+1.0%)" in whole and "lower bound 99.5: 6.0% above it" in whole
    refused = mpp(*words, "--csv", tmp_path / "a.csv")
    assert refused.exit_code == 2 and "--csv and --offload do not go together" in refused.stderr
    assert refused.stdout == ""


def test_a_longer_schedule_is_not_used_for_more_memory(monkeypatch):
    """The compiler may find a longer one for more memory, and none for the least."""

    def make(request, costs):
        if request.limit < 0.4:
            raise InfeasibleLimit
        return Made(catalog.build("v-zb" if request.limit < 0.45 else "v-min", 4, 8))

    monkeypatch.setattr(flex, "make", make)
    found = flex.some_limits(4, 8, Costs.per_rank(4, 2))
    assert list(found) == [5 / 12, 1 / 2, 7 / 12, 2 / 3, 5 / 6, 1]
    assert {timeline.schedule.name for timeline in found.values()} == {"v-zb"}


def test_what_is_compiled_keeps_the_limit(short_searches):
    found = flex.some_limits(2, 4, Costs.per_rank(2, 2))
    assert 1 in found and 1 / 3 not in found
    assert all(max(line.peak_activations) <= fraction * 2 for fraction, line in found.items())
    lengths = [line.makespan for line in found.values()]
    assert lengths == sorted(lengths, reverse=True)


def test_no_heavy_imports():
    modules = "cli", "cli.flex", "compiler.compile", "schedule.formats.costs_file"
    code = "import sys, " + ", ".join(f"megatron_pp_ext.{module}" for module in modules)
    code += "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib", "megatron", "numpy", "numba", "pydantic"} & set(loaded.stdout.split())


@pytest.mark.parametrize(("words", "completed"), [("mpp sched", "schedule"), ("mpp schedule v-h", "v-half")])
def test_a_shell_completes_commands_and_names(words, completed):
    asking = {"_MPP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "from megatron_pp_ext.cli import app; app(prog_name='mpp')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asking},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [completed]
