"""What a job prints while its schedule is compiled, which one rank of the machine does the first time."""

import math
from pathlib import Path

import pytest

from megatron_pp_ext.compiler.search import annealing, list_scheduling, problem, proposals, timed_order
from megatron_pp_ext.megatron import start_up
from megatron_pp_ext.schedule import loops, program, simulate, walk
from tests.support.training import train

pytestmark = pytest.mark.wide

FLAGS = ("--pipeline-model-parallel-size", "2", "--train-iters", "1", "--pipeline-schedule", "flex")


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule and no code of a loop is kept yet, neither on disk nor by the process that is forked."""
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "schedules"))
    monkeypatch.setattr(loops, "_folder", lambda source: tmp_path / "loops")
    for module in (annealing, list_scheduling, problem, timed_order, simulate, program, walk):
        for loop in vars(module).values():
            if isinstance(loop, loops.Loop):
                monkeypatch.setattr(loop, "_compiled", None)
    monkeypatch.setattr(proposals, "_PAUSE_SECONDS", math.inf)


def test_one_rank_says_what_it_compiles_and_only_the_first_time(
    new_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(run: str) -> list[str]:
        lines = tmp_path / run
        lines.touch()

        def write(line: str) -> None:
            with lines.open("a") as file:
                file.write(f"{line}\n")

        monkeypatch.setattr(start_up, "_print_once", write)
        train(2, [*FLAGS, "--pipeline-memory-limit", "0.75"])
        return lines.read_text().splitlines()

    first = said("first")
    begun = [line for line in first if line.startswith("compiling a schedule for p = 2, m = 8, ")]
    ended = [line for line in first if line.startswith("compiled a schedule for p = 2, m = 8, ")]
    assert len(begun) == len({*begun}) == len(ended) > 0
    assert {*first} - {*begun, *ended} == {loops.FIRST_TIME}
    assert said("second") == []
