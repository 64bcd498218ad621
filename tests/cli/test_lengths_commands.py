"""Commands that are told the lengths of documents."""

import json
import re
from pathlib import Path

import pytest

from megatron_pp_ext.features.units.comparison import NAMES
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import csv_file

STEP = [[4000, 300], [9000], [700] * 8, [52000], [5000], [6000, 6000], [800], [20000]]


@pytest.fixture
def lengths(tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps(STEP))
    return tmp_path / "lengths.json"


def test_a_schedule_is_shown_in_every_order(mpp, lengths, tmp_path):
    files = ("--csv", tmp_path / "a.csv", "--trace", tmp_path / "a.trace", "--json", tmp_path / "a.json")
    result = mpp("schedule", "zb-h1", "-p", 4, "--lengths", lengths, *files)
    assert result.exit_code == 0, result.output
    rows = {name: re.search(rf"│ {name} +│ +([0-9.]+)", result.output) for name in NAMES}
    assert all(rows.values()), result.output
    steps = {name: float(found[1]) for name, found in rows.items()}
    assert steps["searched"] == min(steps.values()) < steps["given"]
    order = [int(number) for number in re.search(r"searched: ([0-9 ]+)", result.output)[1].split()]
    assert sorted(order) == list(range(8))
    assert csv_file.read(tmp_path / "a.csv").microbatches == 8
    numbers = json.loads((tmp_path / "a.json").read_text())
    assert numbers["lower_bound"] <= numbers["makespan"]
    events = json.loads((tmp_path / "a.trace").read_text())["traceEvents"]
    work = [event["args"] for event in events if event["ph"] == "X"]
    assert {args["tokens"] for args in work} == {sum(part) for part in STEP}
    first = next(args for args in work if args["microbatch"] == 0)
    assert first["tokens"] == sum(STEP[order[0]])


def test_another_order_is_shown(mpp, lengths):
    result = mpp("schedule", "1f1b", "-p", 4, "--lengths", lengths, "--order", "given")
    assert "given: 0 1 2 3 4 5 6 7" in result.output
    result = mpp("schedule", "1f1b", "-p", 4, "--lengths", lengths, "--order", "best")
    assert "--order is best: give one of given, rule and search" in result.output
    assert "--order is given without --lengths" in mpp("schedule", "1f1b", "--order", "rule").output


def test_a_compiled_schedule_keeps_its_limit_in_every_planned_order(mpp, lengths):
    words = ("schedule", "flex", "-p", 4, "--memory-limit", 0.75, "--trials", 100, "--lengths", lengths)
    result = mpp(*words)
    assert result.exit_code == 0, result.output
    assert "searched" in result.output


def test_schedules_are_compared(mpp, lengths, tmp_path):
    result = mpp("compare", "-p", 2, "--lengths", lengths, "--plan-budget", 1, "--svg", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    for name in catalog.NAMES:
        assert len(re.findall(rf"│ {name} +│", result.output)) == 2, "steps and peaks"
    assert "searched" in (tmp_path / "a.svg").read_text()


def test_measured_costs_say_at_which_length(mpp, lengths, tmp_path):
    costs = {"stages": [{"forward": 0.1, "input_gradient": 0.1, "weight_gradient": 0.1}] * 2}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    words = ("schedule", "1f1b", "-p", 2, "--lengths", lengths, "--costs", tmp_path / "costs.json")
    assert "does not state the length of its costs" in mpp(*words).output
    (tmp_path / "costs.json").write_text(json.dumps({**costs, "sizes": {"seq_length": 8000}}))
    assert mpp(*words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schedule", "1f1b", "-m", 7), "-m is 7, but"),
        (("schedule", "1f1b", "--output-layer", 1), "--output-layer and --lengths do not go together"),
        (("schedule", "1f1b", "--offload", "auto", "--copy", 1), "--lengths goes neither with"),
        (("compare", "--offload", "auto", "--copy", 1), "--lengths and --offload"),
        (("compare", "--equal-at", 0), "--equal-at is 0"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message, mpp, lengths):
    result = mpp(*words, "--lengths", lengths)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_options_about_lengths_need_them(mpp):
    result = mpp("schedule", "1f1b", "--equal-at", 100)
    assert result.exit_code == 2
    assert "--equal-at is given without --lengths" in result.output


def test_an_estimate_expects_steps_of_drawn_lengths(mpp, tmp_path):
    (tmp_path / "drawn.json").write_text("[300, 500, 900, 4096]")
    flags = "--pipeline-model-parallel-size 4 --pipeline-schedule v-half"
    sizes = ("--world-size", 8, "--seq-length", 4096, "--global-batch-size", 16)
    words = ("estimate", "--model", "llama3-8b", *sizes, "--lengths", tmp_path / "drawn.json", "--draws", 2)
    words = (*words, "--json", tmp_path / "a.json")
    result = mpp(*words, "--", *flags.split())
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "a.json").read_text())["by_length"]
    assert found["search"] <= found["rule"]
    assert found["search"] <= found["given"]
    assert found["balanced"] > 0
    assert found["heaviest"] > 1
    assert "searched, documents balanced over replicas" in result.output
    assert found["grounds"].startswith("no range of times to expect: none of ")
    assert found["grounds"].endswith(" was under v-half, or with documents of different lengths")
    again = mpp(*words, "--", *flags.split())
    assert again.output == result.output


LENGTHS = "9000 4000 300\n52000\n20000 5000\n31000\n"


@pytest.mark.parametrize("tokens", ["4096", "auto"])
def test_the_least_limit_is_a_part_of_1f1b_s_peak(mpp, tmp_path: Path, tokens: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(LENGTHS)

    def schedule(limit: float):
        words = "schedule", "flex", "-p", 2, "--lengths", file, "--slice-tokens", tokens
        return mpp(*words, "--memory-limit", limit)

    refused = schedule(0.01)
    assert refused.exit_code == 2
    found = re.search(
        r"^mpp: memory limit 0.01 of 1f1b's peak is infeasible, .*longest document.* at least (\S+)$",
        refused.stderr.strip(),
    )
    assert found, refused.stderr
    least = float(found[1])
    assert schedule(least).exit_code == 0
    assert schedule(least - 1e-4).exit_code == 2


def test_a_comparison_has_the_steps_of_each_schedule_whole_and_in_units(mpp, tmp_path: Path) -> None:
    file, picture = tmp_path / "lengths.txt", tmp_path / "steps.svg"
    file.write_text(LENGTHS)
    words = "-p", 2, "--lengths", file, "--slice-tokens", 8192
    table = mpp("compare", *words, "--svg", picture).stdout
    rows = {
        cells[0]: cells[1:]
        for cells in ([cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines())
        if cells
    }
    assert picture.stat().st_size
    for name in "1f1b", "v-half":
        whole, in_units, _, peak, *_ = rows[name]
        alone = mpp("schedule", name, *words).stdout
        assert f"over the work of the busiest rank: {in_units}" in alone
        assert f"peak of the fullest rank: {peak} tokens" in alone
        table_of_orders = mpp("schedule", name, "-p", 2, "--lengths", file).stdout
        assert re.search(rf"searched .*{whole}", table_of_orders), table_of_orders
    assert rows["flex 1.00"][0] == ""
    assert not any("+P" in name for name in rows)
    in_pairs = mpp("compare", *words, "--pair-time", 0.6).stdout
    (row,) = (line for line in in_pairs.splitlines() if "dualpipe-v +P" in line)
    alone = mpp("schedule", "dualpipe-v", *words, "--pair-time", 0.6).stdout
    assert f"over the work of the busiest rank: {row.split('│')[3].strip()}" in alone
    assert "flex 0.25" not in rows, "no rank can keep the longest document in a quarter"
