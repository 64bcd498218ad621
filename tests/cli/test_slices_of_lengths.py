"""mpp schedule --lengths --slice-tokens: the least memory limit that it names is one that it takes."""

import re
from pathlib import Path

import pytest

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
