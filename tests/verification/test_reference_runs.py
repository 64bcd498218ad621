"""The flags of the runs that are compared, and what cannot be."""

from pathlib import Path

import pytest

from megatron_pp_ext.job.our_flags import add_flags
from megatron_pp_ext.verification.reference_runs import (
    SCHEDULE_FLAGS,
    differs_with_dropout,
    planned,
    schedule_of,
    stock_flags,
)

PP2 = "--pipeline-model-parallel-size 2"
JOB = f"{PP2} --num-layers 8 --lr 0.1 --train-iters 500 --save out --save-interval 10 --mock-data"


def stock(flags: str) -> str:
    return " ".join(stock_flags(flags.split()))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("--pipeline-schedule v-half --bf16", "--bf16"),
        ("--pipeline-schedule=flex --pipeline-memory-limit 0.5 --bf16", "--bf16"),
        ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-allow-waits --bf16", "--bf16"),
        ("--pipeline-schedule 1f1b --overlap-moe-expert-parallel-comm --bf16", "--bf16"),
        ("--pipeline-layer-seeds", "--pipeline-layer-seeds"),
        ("--pipeline-model-parallel-layout Et|tt", "--pipeline-model-parallel-layout Et|tt"),
        ("--pipeline-model-parallel-layout=E|(t|)*2t*2L", "--pipeline-model-parallel-layout Et|tttL"),
        ("--hybrid-layer-pattern *-|*|-|*-/*", "--hybrid-layer-pattern *-*|-*-/*"),
    ],
)
def test_stock_s_flags(ours: str, theirs: str) -> None:
    assert stock(f"{PP2} {ours}") == f"{PP2} {theirs}"


def test_stages_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="3 stages cannot be shared evenly by 2 ranks"):
        stock(f"{PP2} --pipeline-model-parallel-layout Et|t|tL")


def test_every_flag_of_a_schedule_is_known() -> None:
    """A new flag of this package has to be left out of stock's run, or named here."""
    import argparse

    parser = add_flags(argparse.ArgumentParser(add_help=False))
    elsewhere = {
        "--pipeline-trace", "--profile-pipeline",  # files of the real run
        "--rehearse-pipeline", "--verify-pipeline", "--verify-pipeline-gradients",  # set by commands
        "--pipeline-layer-seeds",  # works under stock too
    }  # fmt: skip
    given = {flag: action.nargs for action in parser._actions for flag in action.option_strings}
    assert given.keys() - elsewhere <= SCHEDULE_FLAGS.keys()
    for flag in given.keys() & SCHEDULE_FLAGS.keys():
        assert SCHEDULE_FLAGS[flag] == (given[flag] != 0), flag


def test_a_checkpoint_is_made(tmp_path: Path) -> None:
    flags = [*JOB.split(), "--pipeline-schedule", "v-half", "--hidden-dropout", "0.1"]
    made, ours, theirs = planned(flags, tmp_path, 3, gradients=True)
    assert [run.name for run in (made, ours, theirs)] == ["checkpoint", "schedule", "stock"]
    assert last(made.flags, "--exit-interval") == "1"
    # Weights in this format load under any placement.
    assert last(made.flags, "--ckpt-format") == "torch_dist"
    assert last(made.flags, "--save") == last(ours.flags, "--load") == last(theirs.flags, "--load")
    assert "out" not in made.flags
    assert "--pipeline-schedule" not in made.flags + theirs.flags
    assert last(ours.flags, "--pipeline-schedule") == "v-half"
    for run in (ours, theirs):
        assert {"--finetune", "--verify-pipeline-gradients"} < set(run.flags)
        assert last(run.flags, "--exit-interval") == "3"
        assert last(run.flags, "--hidden-dropout") == last(run.flags, "--attention-dropout") == "0"
        assert last(run.flags, "--verify-pipeline") == str(tmp_path / run.name)
    *_, kept = planned(flags, tmp_path, 3, keep_dropout=True, repeat=True)
    assert kept.name == "stock-again"
    assert last(kept.flags, "--hidden-dropout") == "0.1"


def last(flags: tuple[str, ...], name: str) -> str:
    return flags[len(flags) - flags[::-1].index(name)]


def test_the_checkpoint_of_the_job(tmp_path: Path) -> None:
    flags = [*JOB.split(), "--pipeline-schedule", "zb-h1", "--load", str(tmp_path)]
    with pytest.raises(ValueError, match="holds no checkpoint"):
        planned(flags, tmp_path / "runs", 3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    ours, theirs = planned(flags, tmp_path / "runs", 3)
    assert last(ours.flags, "--load") == last(theirs.flags, "--load") == str(tmp_path)
    # Megatron takes the last of two folders.
    twice = planned([*flags[:-2], "--load", "elsewhere", *flags[-2:]], tmp_path / "runs", 3)
    assert last(twice[0].flags, "--load") == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (PP2, "add --pipeline-schedule NAME"),
        (f"{PP2} --pipeline-schedule v-halv", "did you mean 'v-half'"),
        (f"{PP2} --pipeline-schedule pipedream", "its losses differ by design"),
        ("--pipeline-schedule v-half", "set --pipeline-model-parallel-size to 2"),
        (f"{PP2} --pipeline-schedule v-half --ckpt-step 3", "--ckpt-step cannot be resumed"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        schedule_of(flags.split())
    assert "\n" not in str(error.value)


def test_which_schedules_differ_with_dropout() -> None:
    assert not any(map(differs_with_dropout, ("gpipe", "1f1b", "zb-h1", "zb-h2")))
    assert "seeds by pipeline rank" in str(differs_with_dropout("v-half"))
    assert differs_with_dropout("interleaved")
    assert differs_with_dropout("csv:a.csv")
