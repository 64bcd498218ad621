"""All ranks get one answer to what each of them reports, and a process group can be made afterwards."""

import os
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_pp_ext.megatron.trainer import agreement
from tests.support.ranks import run_ranks

SOON, LATE = timedelta(seconds=5), timedelta(seconds=100)


def count(reports: Sequence[str | None]) -> str:
    """Say what the ranks reported, and nothing if all reported the same."""
    return "" if len(set(reports)) == 1 else " ".join(str(report) for report in reports)


def report(rank: int, words: list[str], patience: timedelta) -> str:
    """Meet, each rank with its own one of ``words``; one without a word stays away."""
    if not words[rank]:
        return ""
    answer = agreement.meet(words[rank], count, patience)
    if not answer:
        dist.init_process_group("gloo")
        dist.barrier()
    return answer


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_get_one_answer(ranks: int) -> None:
    words = [*"abcde"[:ranks]]
    assert run_ranks(report, ranks, words, LATE) == [" ".join(words)] * ranks


def test_a_process_group_is_made_beside_the_store() -> None:
    assert run_ranks(report, 3, ["a"] * 3, LATE) == [""] * 3


@pytest.mark.parametrize("absent", [1, 2])
def test_one_that_does_not_come_is_not_waited_for_longer(absent, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", SOON)
    words = ["" if rank == absent else "a" for rank in range(3)]
    told = " ".join(word or "None" for word in words)
    assert run_ranks(report, 3, words, SOON) == [told if word else "" for word in words]


def meet_at_the_agents_store(rank: int) -> str:
    """As under torchrun, whose agent serves the store: here rank 0 plays the agent."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(*address, is_master=True, wait_for_workers=False) if rank == 0 else None
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    answer = report(rank, ["a", "b"], LATE)
    if agent is not None:
        agent.wait(["megatron_pp_ext/heard"], LATE)
    return answer


def test_the_store_that_torchrun_serves_is_used() -> None:
    assert run_ranks(meet_at_the_agents_store, 2) == ["a b"] * 2


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_only_ranks_of_a_job_meet(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert agreement.can_rendezvous()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not agreement.can_rendezvous()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(missing)
    assert not agreement.can_rendezvous()
