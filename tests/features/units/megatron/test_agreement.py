"""Lengths that all ranks agree on, and the one line in which a job ends where they do not."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ranks import run_ranks

# isort: split
import torch.distributed as dist

from megatron_pp_ext.features.units.megatron.agreement import Agreed, UnknownLengths, agree, of_all
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.schedule.costs import Costs

WORK = LengthCosts.with_attention(Costs.per_rank(2), 1).work


def fails(error: Exception) -> Any:
    raise error


def asked(
    rank: int,
    reads: list[Any],
    of_experts: bool = False,
    tells_all: bool = False,
    sizes: Any = None,
    trusted: Any = None,
) -> Any:
    """Return what each rank agrees to, where pipelines are ranks 0-1 and 2-3."""
    dist.init_process_group("gloo")
    pipelines = [dist.new_group([first, first + 1]) for first in range(0, len(reads), 2)]
    experts = [dist.new_group([stage, stage + 2]) for stage in range(2)] if of_experts else [None, None]
    group = pipelines[rank // 2]
    inputs = SimpleNamespace(group=group, groups=SimpleNamespace(pp=group, ep=experts[rank % 2]))
    try:
        about = (lambda: sizes[rank], trusted[rank]) if sizes else ()
        found = agree(reads[rank], inputs, WORK, *about)
        return (found, of_all(found.own, inputs)) if tells_all else found
    except RuntimeError as error:
        return str(error)
    except KeyError as error:
        return error


def agreed(*reads: Any, **about: Any) -> list[Any]:
    return run_ranks(partial(asked, reads=list(reads), **about), len(reads), timeout=120)


def gives(*lengths: tuple[int, ...]) -> Any:
    return lambda: lengths


def test_ranks_without_data_take_the_lengths_of_others():
    known = ((3, 4), (5,))
    assert agreed(gives(*known), lambda: None) == [Agreed(known, known)] * 2
    assert agreed(lambda: None, gives(*known)) == [Agreed(known, known)] * 2


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ((gives((3,), (4,)), gives((3,), (5,))), "pipeline ranks 0 and 1 read microbatches of different"),
        ((lambda: None, lambda: None), "no rank of this pipeline has a data iterator"),
        ((gives((3,)), lambda: fails(RuntimeError("the data ended"))), "the data ended"),
    ],
)
def test_all_ranks_end_in_the_same_line(reads, words):
    one, other = agreed(*reads)
    assert words in one
    assert one == other


def test_what_a_loader_raises_comes_through_and_ends_the_other_ranks():
    one, other = agreed(lambda: fails(KeyError("shard 3")), gives((3,)))
    assert isinstance(one, KeyError) and one.args == ("shard 3",)
    assert other == "the data of pipeline rank 0 raised KeyError: 'shard 3'"


def test_lengths_that_cannot_be_told_are_told_to_all():
    assert agreed(gives((3,)), lambda: fails(UnknownLengths("no idea"))) == [Agreed(unknown="no idea")] * 2


def test_pipelines_that_share_experts_plan_alike():
    """By the heaviest microbatch in each place: one long document costs more than two."""
    one, other = ((5, 5), (9,), (1,)), ((10,), (3, 3), (2,))
    found = agreed(gives(*one), lambda: None, lambda: None, gives(*other), of_experts=True)
    assert [rank.own for rank in found] == [one, one, other, other]
    assert {rank.planned for rank in found} == {((10,), (9,), (2,))}


def test_pipelines_that_share_experts_know_all_lengths():
    one, other = ((5, 5), (9,)), ((10,), (3, 3))
    reads = gives(*one), lambda: None, lambda: None, gives(*other)
    found = agreed(*reads, of_experts=True, tells_all=True)
    assert {of_all for _, of_all in found} == {(one, other)}
    alone = agreed(*reads, tells_all=True)
    assert [of_all for _, of_all in alone] == [(one,), (one,), (other,), (other,)]


@pytest.mark.parametrize(
    ("sizes", "trusted", "expected"),
    [
        ([((1, 5),)] * 4, [True] * 4, [True] * 4),
        ([((1, 5),)] * 4, [True, True, True, False], [False] * 4),
        ([((1, 5),)] * 2 + [()] * 2, [True] * 4, [False] * 4),
    ],
)
def test_pipelines_that_share_experts_trust_shapes_together(sizes, trusted, expected):
    """They launch in one order, in which receives of announced shapes have other places."""
    found = agreed(*[gives((5,))] * 4, of_experts=True, sizes=sizes, trusted=trusted)
    assert [rank.are_trusted for rank in found] == expected
    apart = agreed(*[gives((5,))] * 4, sizes=sizes, trusted=trusted)
    assert [rank.are_trusted for rank in apart] == [True, True, expected[2], expected[3]]


def test_a_problem_ends_the_other_pipelines_too():
    reads = gives((3,)), gives((4,)), gives((3,)), gives((3,))
    found = agreed(*reads, of_experts=True)
    assert len(set(found)) == 1
    assert "pipeline ranks 0 and 1 read microbatches" in found[3]
    (first, *_) = agreed(gives((3,)), gives((3,)), gives((3,), (4,)), gives((3,), (4,)), of_experts=True)
    assert "pipelines that share experts have 1 and 2 microbatches" in first
