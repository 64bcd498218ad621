"""Command lines of short runs that are made from those of real ones."""

import pytest

from megatron_pp_ext.jobs import command

REAL = [
    "--num-layers", "4", "--train-iters", "500", "--exit-interval", "400", "--eval-iters", "50",
    "--seq-length", "64", "--hidden-size", "8",
]  # fmt: skip


def last(words: list[str], name: str) -> str:
    return words[len(words) - words[::-1].index(name)]


def test_the_last_of_two_values_counts() -> None:
    """As it does for Megatron's parser."""
    words = command.words_of(["--tensor-model-parallel-size=2", "--x", "--tensor-model-parallel-size", "4"])
    assert command.whole_number(words, "--tensor-model-parallel-size") == 4
    assert command.whole_number(words, "--pipeline-model-parallel-size") == 1
    with pytest.raises(ValueError, match="--x needs a whole number after it"):
        command.whole_number(words, "--x")


def test_a_short_run_overrides_the_flags_of_the_real_one() -> None:
    short = command.short_run(REAL, 3, {"--lr": 0.5})
    assert [last(short, flag) for flag in ("--exit-interval", "--eval-iters", "--lr")] == ["3", "0", "0.5"]
    # The learning rate's schedule is that of the real run's steps.
    assert last(short, "--train-iters") == "500"
    assert last(command.short_run(["--train-iters", "2"], 3, {}), "--train-iters") == "3"
    # What Megatron needs and the flags lack.
    assert (last(short, "--max-position-embeddings"), last(short, "--micro-batch-size")) == ("64", "1")
    assert "--mock-data" in short
    assert "--mock-data" not in command.short_run([*REAL, "--data-path", "text"], 3, {})


def test_files_of_the_real_run_are_left_alone() -> None:
    flags = "--save=out --lr 1 --load in --pipeline-trace a.json --tensorboard-dir=t --bf16"
    assert list(command.without(flags.split())) == ["--lr", "1", "--bf16"]


def test_full_recomputation_needs_more_than_its_name() -> None:
    """Megatron refuses it without a method and a number of layers."""
    again = ["--recompute-granularity", "full"]
    stand_ins = " ".join(command.missing(again))
    assert "--recompute-method uniform --recompute-num-layers 1" in stand_ins
    given = [*again, "--recompute-method", "block", "--recompute-num-layers", "3"]
    for flags in (given, ["--recompute-granularity", "selective"]):
        assert not any(word.startswith("--recompute") for word in command.missing(flags))
