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
