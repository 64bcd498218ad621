"""Ranks that were started with different flags, files or releases end, each with the same clear line.

The embeddings are tied: ranks that disagree about the placement would otherwise wait for each other while
the model is built, or after it, until the timeout.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron_pp_ext
from megatron_pp_ext import cpu, pretrain_gpt
from megatron_pp_ext.schedule import catalog, csv_file
from tests.support.ranks import run_ranks
from tests.support.training import TINY

PP2 = ("--pipeline-model-parallel-size", "2")
V_HALF = ("--pipeline-schedule", "v-half")
FLEX = ("--pipeline-schedule", "flex", "--pipeline-memory-limit")


def start(rank: int, flags: list[list[str]], change: Callable[[int], None] | None) -> str:
    """Start a rank with its own ``flags``; return the line with which it ended."""
    sys.argv = ["pretrain_gpt.py", *cpu.with_cpu_flags([*TINY, "--mock-data", *PP2, *flags[rank]])]
    if change is not None:
        change(rank)
    try:
        pretrain_gpt.main()
    except SystemExit as end:
        return str(end.code)
    return "trained"


def lines(*flags: tuple[str, ...], change: Callable[[int], None] | None = None) -> list[str]:
    """Return the lines with which the ranks of a job ended that were started with ``flags``, one each."""
    found = run_ranks(start, len(flags), [list(words) for words in flags], change)
    assert all(line.startswith("megatron_pp_ext: ") and "\n" not in line for line in found)
    return [line.removeprefix("megatron_pp_ext: ") for line in found]


DIFFERENT = {
    "a schedule on one rank only": (V_HALF, (), "--pipeline-schedule is v-half on rank 0 and not given"),
    "no schedule on the first rank": ((), V_HALF, "--pipeline-schedule is not given on rank 0 and v-half"),
    "stock by name": (V_HALF, ("--pipeline-schedule", "1f1b"), "is v-half on rank 0 and 1f1b on rank 1"),
    "another limit": (
        (*FLEX, "0.75", "--global-batch-size", "2"),
        (*FLEX, "1", "--global-batch-size", "2"),
        "--pipeline-memory-limit is 0.75 on rank 0 and 1 on rank 1",
    ),
    "other chunks": (
        ("--pipeline-schedule", "interleaved"),
        ("--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "4"),
        "the placement is loop, 2 ranks x 2 chunks on rank 0 and loop, 2 ranks x 4 chunks on rank 1",
    ),
    "other layers": (
        (*V_HALF, "--pipeline-model-parallel-layout", "Ett|tt|tt|ttL"),
        (*V_HALF, "--pipeline-model-parallel-layout", "Et|tt|tt|tttL"),
        "--pipeline-model-parallel-layout is Ett|tt|tt|ttL on rank 0 and Et|tt|tt|tttL on rank 1",
    ),
    "other microbatches": (
        (*V_HALF, "--global-batch-size", "4"),
        (*V_HALF, "--global-batch-size", "8"),
        "the microbatches of a step are 4 on rank 0 and 8 on rank 1",
    ),
    "seeds by layer": (
        (*V_HALF, "--pipeline-layer-seeds"),
        V_HALF,
        "--pipeline-layer-seeds is given on rank 0 and not given on rank 1",
    ),
    "a trace on one rank only": (
        (*V_HALF, "--pipeline-trace", "trace.json"),
        V_HALF,
        "--pipeline-trace is given on rank 0 and not given on rank 1",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_flags(case: str) -> None:
    first, second, message = DIFFERENT[case]
    told = lines(first, second)
    assert told[0] == told[1]
    assert message in told[0]
    assert told[0].endswith("start all ranks with the same flags and files, and the same megatron_pp_ext")


def test_all_ranks_are_named() -> None:
    flags = ("--pipeline-model-parallel-size", "4", *V_HALF)
    told = lines(flags, flags, (*flags, "--pipeline-layer-seeds"), flags)
    assert set(told) == {told[0]}
    assert "--pipeline-layer-seeds is not given on ranks 0, 1, 3 and given on rank 2;" in told[0]


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
    digests = []
    for rank, name in enumerate(names):
        schedule = catalog.build(name, 2, 8)
        digests.append(schedule.digest[:12])
        (tmp_path / str(rank)).mkdir()
        csv_file.write(schedule, tmp_path / str(rank) / "mine.csv")

    def go_there(rank: int) -> None:
        monkeypatch.chdir(tmp_path / str(rank))  # as on two machines with a disk each

    flags = ("--pipeline-schedule", "csv:mine.csv")
    told = lines(flags, flags, change=go_there)
    assert told[0] == told[1]
    assert message.format(*digests) in told[0]


def test_a_file_of_costs_with_another_content(tmp_path: Path) -> None:
    flags = []
    for rank, message in enumerate(("1.0", "2.0")):
        file = tmp_path / f"{rank}.json"
        stage = '{"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 1}'
        file.write_text(f'{{"message": {message}, "stages": [{", ".join([stage] * 4)}]}}')
        flags.append((*FLEX, "1", "--pipeline-costs", str(file)))
    told = lines(*flags)
    assert told[0] == told[1]
    assert "the content of --pipeline-costs has the digest " in told[0]


def test_the_same_content_under_other_names_trains(tmp_path: Path) -> None:
    """Each machine may keep its copy of the file where it likes."""
    flags = []
    for rank in range(2):
        file = tmp_path / f"{rank}.csv"
        csv_file.write(catalog.build("v-half", 2, 8), file)
        flags.append(["--pipeline-schedule", f"csv:{file}"])
    assert run_ranks(start, 2, flags, None) == ["trained", "trained"]


def test_another_release_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow_old(rank: int) -> None:
        if rank == 1:
            monkeypatch.setattr(megatron_pp_ext, "__version__", "0.0.9")

    told = lines(V_HALF, V_HALF, change=grow_old)
    assert told[0] == told[1]
    assert f"megatron_pp_ext is {megatron_pp_ext.__version__} on rank 0 and 0.0.9 on rank 1" in told[0]


REFUSED = {
    "no such file": (("--pipeline-schedule", "csv:/nowhere.csv"), "/nowhere.csv"),
    "no such schedule": (("--pipeline-schedule", "v-haf"), "no schedule is called 'v-haf'"),
    "a limit that cannot be kept": ((*FLEX, "0.01"), "infeasible"),
    "a check of Megatron's": ((*V_HALF, "--num-attention-heads", "5"), "Megatron refuses these flags"),
}


@pytest.mark.parametrize(("refused", "case"), enumerate(REFUSED))
def test_a_rank_that_is_refused_takes_the_others_along(refused: int, case: str) -> None:
    refused %= 2
    flags, message = REFUSED[case]
    told = lines(*((flags if rank == refused else V_HALF) for rank in range(2)))
    assert message in told[refused]
    assert told[1 - refused] == f"rank {refused} of this job was refused: {told[refused]}"
