"""A flag that Megatron does not have is answered with the one that was meant, and with no other."""

import pytest

from megatron_pp_ext.job.flag_table import hint

KNOWN = (
    "--num-layers",
    "--micro-batch-size",
    "--pipeline-model-parallel-size",
    "--pipeline-schedule",
    "--overlap-param-gather",
    "--use-mcore-models",
    "--muon-nesterov",
)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--pipeline-paralell-size", "--pipeline-model-parallel-size"),
        ("--pipeline-shedule", "--pipeline-schedule"),
        ("--muon-use-nesterov", "--muon-nesterov"),
    ],
)
def test_a_word_may_be_mistyped_missing_or_too_many(flag: str, meant: str) -> None:
    assert hint(flag, KNOWN, "see --help") == f"did you mean {meant!r}?"


@pytest.mark.parametrize("flag", ["--delay-param-gather", "--use-legacy-model", "--swiglu"])
def test_another_word_means_another_flag(flag: str) -> None:
    assert hint(flag, KNOWN, "see --help") == "see --help"


def test_a_flag_that_is_gone_is_left_out() -> None:
    assert hint("--use-legacy-models", KNOWN, "see --help").endswith("leave it out")
