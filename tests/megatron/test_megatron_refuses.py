"""What Megatron's own parser and validation refuse is one line, before any process group exists."""

import re
import sys
from collections.abc import Sequence

import pytest

from tests.support.ranks import RankError, run_ranks
from tests.support.training import TINY, since, train

# isort: split
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars

from megatron_pp_ext import cpu, pretrain_gpt
from megatron_pp_ext.megatron import releases
from megatron_pp_ext.setting_error import failed_check

DATA = ("--mock-data",)


def without(*names: str) -> list[str]:
    """The flags of the tiny GPT on mock data but for those called ``names``."""
    kept, words = [], [*TINY, *DATA]
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        if words[start] not in names:
            kept += words[start:end]
    return kept


def refuse(rank: int, jobs: Sequence[Sequence[str]]) -> list[str]:
    """The line with which ``pretrain_gpt`` refuses each of ``jobs``, of which nothing is kept."""
    found = []
    for argv in jobs:
        sys.argv = ["pretrain_gpt.py", *argv]
        with pytest.raises(SystemExit) as end:
            pretrain_gpt.main()
        found.append(str(end.value.code).removeprefix("megatron_pp_ext: "))
        destroy_global_vars()
        destroy_num_microbatches_calculator()
    return found


def refusals(*jobs: Sequence[str]) -> list[str]:
    ((*found,),) = run_ranks(refuse, 1, [cpu.with_cpu_flags(argv) for argv in jobs])
    return found


PROBLEMS = (
    ("--data-path no/such", "has no no/such.idx and no no/such.bin; give the path"),
    ("--lr x", "argument --lr: invalid float value: 'x'; correct it"),
    ("--pipline-schedule v", "unrecognized arguments: .* v; did you mean '--pipeline-schedule'"),
    ("--min-lr 1", r"Megatron refuses these flags: .*min_lr.* \(megatron.training.arguments, line"),
    ("--sft", "--sft is not supported by megatron_pp_ext.pretrain_gpt"),
)


def test_what_does_not_fit_is_named() -> None:
    jobs = [[*without(*(DATA if "--data-path" in flags else ())), *flags.split()] for flags, _ in PROBLEMS]
    lines = refusals(*jobs)
    for (_, problem), line in zip(PROBLEMS, lines, strict=True):
        assert re.search(problem, line), line


def test_a_check_without_words_is_quoted() -> None:
    try:
        assert not DATA
    except AssertionError as error:
        error.args = ()
        line = failed_check(error)
    assert line.startswith("assert not DATA (")


@since(releases.CORE_0_19, "before 0.19 Megatron asks for --spec itself")
def test_hybrid_layers_name_the_package_that_they_need() -> None:
    """Megatron's own are Transformer Engine's: without it, building the model fails without a word."""
    flags = ["--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", "*-*-|*-*-"]
    with pytest.raises(RankError, match=r"Transformer Engine is not installed; install it, .* --spec MODULE"):
        train(2, flags)
