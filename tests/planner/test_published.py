"""Published measurements that the models predict; benchmarks/results/planner.md has those that they miss."""

import pytest

from benchmarks.planner.published import best_of_grid, llama_step, megatron_step, ranked
from megatron_pp_ext.schedule.timing import ScheduleTimer
from reference.published_runs import GRID, GRID_SCHEDULES, LLAMA, MEGATRON


def test_the_98b_grid_search(monkeypatch):
    """V-ZB wins at 1,024 tokens, and loses most of its lead over V-Half at 3,072 (arXiv 2405.15362).

    There V-Half wins in the published table; here all five are within 3% of each other.  In the authors'
    runs no product of a W ran while messages of an I travelled.
    """
    monkeypatch.setattr(ScheduleTimer, "_lends", lambda timer, costs: False)
    short, long = (
        {name: best_of_grid(length, family).estimate.utilisation for name, family in GRID_SCHEDULES.items()}
        for length in GRID
    )
    assert ranked(short)[-1] == ranked(GRID[1024])[-1] == "V-ZB"
    assert short["V-ZB"] > 1.02 * short["V-Half"]
    assert long["V-ZB"] < 1.02 * long["V-Half"]


def test_the_order_of_memory_and_the_fastest_of_llama():
    found = {name: llama_step(schedule) for name, (schedule, _, _) in LLAMA.items()}
    memory = {name: step.fullest.total for name, step in found.items()}
    assert ranked(memory) == ranked({name: size for name, (_, _, size) in LLAMA.items()})
    speed = {name: step.tokens_per_second for name, step in found.items()}
    assert ranked(speed)[-1] == ranked({name: rate for name, (_, rate, _) in LLAMA.items()})[-1]


@pytest.mark.parametrize("run", MEGATRON, ids=lambda run: run.name)
def test_megatrons_own_steps(run):
    for selective, seconds in ((False, run.full), (True, run.selective)):
        found = megatron_step(run, selective)
        assert found.step_seconds == pytest.approx(seconds, rel=0.15)
        assert found.fullest.total < 80e9
