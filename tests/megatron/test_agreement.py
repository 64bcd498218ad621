"""Ranks that were started with different flags, files or releases end, each with the same clear line.

The embeddings are tied: ranks that disagree about the placement would otherwise wait for each other while
the model is built, or after it, until the timeout.
"""

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_pp_ext import cpu, pretrain_gpt
from megatron_pp_ext.megatron.trainer import agreement
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.version import VERSION
from tests.support.flags import arguments, requested_by
from tests.support.ranks import run_ranks
from tests.support.tiers import first
from tests.support.training import TINY

PP2 = "--pipeline-model-parallel-size 2"
V_HALF = "--pipeline-schedule v-half"
FLEX = "--pipeline-schedule flex --pipeline-memory-limit"
CSV = "--pipeline-schedule csv:mine.csv"


def start(rank: int, flags: list[str]) -> str:
    """Start a rank with its own ``flags``; return the line with which it ended."""
    sys.argv = ["pretrain_gpt.py", *cpu.with_cpu_flags([*TINY, "--mock-data", *flags[rank].split()])]
    try:
        pretrain_gpt.main()
    except SystemExit as end:
        return str(end.code)
    return "trained"


def lines(*flags: str) -> list[str]:
    """Return the lines with which the ranks of a job ended that were started with ``flags``, one each."""
    found = run_ranks(start, len(flags), [f"{PP2} {words}" for words in flags])
    assert all(line.startswith("megatron_pp_ext: ") and "\n" not in line for line in found)
    return [line.removeprefix("megatron_pp_ext: ") for line in found]


def report(flags: str) -> str:
    """Return what a rank of two with ``flags`` tells the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        args = arguments(f"{PP2} {flags}")
        return json.dumps(agreement.values(args, requested_by(args)))


DIFFERENT = {
    (V_HALF, ""): "--pipeline-schedule is v-half on rank 0 and not given on rank 1",
    (V_HALF, "--pipeline-schedule 1f1b"): "is v-half on rank 0 and 1f1b on rank 1",
    (f"{FLEX} 0.75", f"{FLEX} 1"): "--pipeline-memory-limit is 0.75 on rank 0 and 1 on rank 1",
    (
        "--pipeline-schedule interleaved",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4",
    ): "the placement is loop, 2 ranks x 2 chunks on rank 0 and loop, 2 ranks x 4 chunks on rank 1",
    (
        f"{V_HALF} --pipeline-model-parallel-layout Ett|tt|tt|ttL",
        f"{V_HALF} --pipeline-model-parallel-layout Et|tt|tt|tttL",
    ): "--pipeline-model-parallel-layout is Ett|tt|tt|ttL on rank 0 and Et|tt|tt|tttL on rank 1",
    (f"{V_HALF} --global-batch-size 4", V_HALF): "the microbatches of a step are 4 on rank 0 and 8 on rank 1",
    (
        f"{V_HALF} --pipeline-layer-seeds",
        V_HALF,
    ): "--pipeline-layer-seeds is given on rank 0 and not given on rank 1",
    (
        f"{V_HALF} --pipeline-trace trace.json",
        V_HALF,
    ): "--pipeline-trace is given on rank 0 and not given on rank 1",
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_flags(one: str, other: str) -> None:
    assert DIFFERENT[one, other] in agreement._judge([report(one), report(other)])


def test_all_ranks_are_named_and_told() -> None:
    told = lines("", V_HALF)
    assert told[0] == told[1]
    assert "--pipeline-schedule is not given on rank 0 and v-half on rank 1" in told[0]
    assert told[0].endswith("start all ranks with the same flags and files, and the same megatron_pp_ext")
    plain, seeds = report(V_HALF), report(f"{V_HALF} --pipeline-layer-seeds")
    found = agreement._judge([plain, plain, seeds, plain])
    assert "--pipeline-layer-seeds is not given on ranks 0, 1, 3 and given on rank 2;" in found


@pytest.mark.parametrize(
    ("names", "message"),
    [
        # The same stages and microbatches on the same ranks, in another order: only the content tells.
        (("v-half", "v-min"), "the schedule's digest is {0} on rank 0 and {1} on rank 1"),
        (
            ("v-half", "1f1b"),
            "the placement is v, 2 ranks x 2 chunks on rank 0 and linear, 2 ranks x 1 chunk on rank 1",
        ),
    ],
)
def test_a_file_with_another_content_under_the_same_name(
    names: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines with a disk each."""
    monkeypatch.chdir(tmp_path)
    digests, reports = [], []
    for name in names:
        schedule = catalog.build(name, 2, 8)
        csv_file.write(schedule, Path("mine.csv"))
        digests.append(schedule.digest[:12])
        reports.append(report(CSV))
    assert message.format(*digests) in agreement._judge(reports)


def test_a_file_of_costs_with_another_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports = []
    for message in ("1.0", "2.0"):
        stage = '{"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 1}'
        Path("costs.json").write_text(f'{{"message": {message}, "stages": [{", ".join([stage] * 4)}]}}')
        reports.append(report(f"{FLEX} 1 --pipeline-costs costs.json"))
    assert "the content of --pipeline-costs has the digest " in agreement._judge(reports)


def test_the_same_content_under_other_names_trains(tmp_path: Path) -> None:
    """Each machine may keep its copy of the file where it likes."""
    files = [tmp_path / f"{rank}.csv" for rank in range(2)]
    for file in files:
        csv_file.write(catalog.build("v-half", 2, 8), file)
    flags = [f"{PP2} --train-iters 1 --pipeline-schedule csv:{file}" for file in files]
    assert run_ranks(start, 2, flags) == ["trained", "trained"]


def test_another_release_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    new, version = report(V_HALF), VERSION
    monkeypatch.setattr("megatron_pp_ext.version.VERSION", "0.0.9")
    told = agreement._judge([new, report(V_HALF)])
    assert f"megatron_pp_ext is {version} on rank 0 and 0.0.9 on rank 1" in told


@pytest.mark.parametrize(
    ("refused", "flags", "message"),
    first(
        1,
        [
            (1, "--pipeline-schedule csv:/nowhere.csv", "/nowhere.csv"),
            (0, f"{FLEX} 0.01", "infeasible"),
            (1, f"{V_HALF} --num-attention-heads 5", "Megatron refuses these flags"),
        ],
    ),
)
def test_a_rank_that_is_refused_takes_the_others_along(refused: int, flags: str, message: str) -> None:
    told = lines(*(flags if rank == refused else V_HALF for rank in range(2)))
    assert message in told[refused]
    assert told[1 - refused] == f"rank {refused} of this job was refused: {told[refused]}"


SOON, LATE = timedelta(seconds=2), timedelta(seconds=100)


def count(reports: Sequence[str | None]) -> str:
    """Say what the ranks reported, and nothing if all reported the same."""
    return "" if len(set(reports)) == 1 else " ".join(str(report) for report in reports)


def reported(rank: int, words: list[str], patience: timedelta) -> str:
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
    assert run_ranks(reported, ranks, words, LATE) == [" ".join(words)] * ranks


def test_a_process_group_is_made_beside_the_store() -> None:
    assert run_ranks(reported, 3, ["a"] * 3, LATE) == [""] * 3


@pytest.mark.parametrize("absent", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_one_that_does_not_come_is_not_waited_for_longer(absent, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", SOON)
    words = ["" if rank == absent else "a" for rank in range(3)]
    told = " ".join(word or "None" for word in words)
    assert run_ranks(reported, 3, words, SOON) == [told if word else "" for word in words]


def meet_at_the_agents_store(rank: int) -> str:
    """As under torchrun, whose agent serves the store: here rank 0 plays the agent."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(*address, is_master=True, wait_for_workers=False) if rank == 0 else None
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    answer = reported(rank, ["a", "b"], LATE)
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
