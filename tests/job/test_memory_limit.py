"""--pipeline-memory-limit: one number for all pipeline ranks, or one for each."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.limits import at_most
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.job import pipeline
from megatron_pp_ext.schedule.costs import CostModel, Costs, StageCosts
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.simulate import Timeline, simulate

RANKS, MICROBATCHES = 3, 6
COSTS = Costs(tuple(StageCosts(10 + stage % 2, 11, 7, activation=4.0) for stage in range(2 * RANKS)), hop=1.0)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (0.75, 0.75),
        ("0.75", 0.75),
        ("1e-3", 0.001),
        ("4e9", 4e9),
        ("4GB", 4e9),
        ("4GiB-4.5 gib-1e3MB", (4 * 2**30, 4.5 * 2**30, 1e9)),
        ("0.9-0.8-0.7", (0.9, 0.8, 0.7)),
        ("4e9-3.5e9-2000000000", (4e9, 3.5e9, 2e9)),
    ],
)
def test_read_and_spelled(given: float | str, limit: float | tuple[float, ...]) -> None:
    assert pipeline.read_limit(given, RANKS) == limit
    assert pipeline.read_limit(pipeline.spelled(limit), RANKS) == limit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("half", "is half, but must be a number above 0; give a fraction"),
        ("0.9--0.8", "is 0.9--0.8, but must be a number above 0; give a fraction"),
        ("0.9-0-0.8", "is 0.9-0-0.8, but must be a number above 0; give a fraction"),
        ("-1", "is -1, but must be a number above 0; give a fraction"),
        ("0.9-inf-0.8", "is 0.9-inf-0.8, but must be a number above 0; give a fraction"),
        (
            "0.9-0.8",
            "0.9-0.8 is for 2 ranks, but --pipeline-model-parallel-size is 3; give one number for all",
        ),
        ("0.9-0.8-4e9", "mixes fractions, which are up to 8, and others; give each rank a fraction, or"),
    ],
)
def test_refused_in_one_line(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^--pipeline-memory-limit [^\n]*$") as raised:
        pipeline.read_limit(given, RANKS)
    assert message in str(raised.value)


def keeps(timeline: Timeline, limits: tuple[float, ...]) -> bool:
    return all(map(at_most, timeline.peak_memory, limits))


def flex(limit: float | tuple[float, ...]) -> Request:
    return replace(named(FLEX, RANKS, MICROBATCHES, 2, limit), trials=12)


def alone(limit: float | tuple[float, ...]) -> Timeline:
    schedule = make(flex(limit), CostModel.fixed(COSTS)).schedule
    return simulate(schedule, COSTS.merged(schedule.placement.stages))


@pytest.mark.parametrize("limits", [(0.45, 1.0, 1.0), (1.0, 1.0, 0.45)])
def test_each_rank_keeps_its_own_limit(limits: tuple[float, ...]) -> None:
    """The ranks with more memory use it, for a shorter step than all would have with the least."""
    found = alone(limits)
    amounts = tuple(fraction * RANKS * 8.0 for fraction in limits)
    assert keeps(found, amounts)
    assert not keeps(found, (min(amounts),) * RANKS)
    assert found.makespan < alone(min(limits)).makespan


def sharing(request: Request) -> Request:
    return replace(request, splits_head=True, trials=12)


def beside_vocabulary(limit: float | tuple[float, ...], shared: Costs) -> Timeline:
    schedule = make(
        sharing(flex(limit)), CostModel(lambda placement: shared if placement.splits_head else COSTS)
    ).schedule
    return simulate(schedule, shared.merged(schedule.placement.stages))


@pytest.mark.wide
def test_each_rank_keeps_its_own_limit_beside_a_shared_vocabulary() -> None:
    """More memory on some of the ranks makes no step longer."""
    shared = COSTS.with_split_head(12.0, RANKS)
    limits = (30.0, 50.0, 50.0)
    found = beside_vocabulary(limits, shared)
    assert keeps(found, limits)
    assert found.makespan <= beside_vocabulary(30.0, shared).makespan


@pytest.mark.parametrize(("free", "is_shorter"), [((30.0, 50.0, 50.0), True), ((50.0, 50.0, 30.0), False)])
def test_auto_shares_a_vocabulary_within_what_each_rank_has_free(free, is_shorter):
    """In the second case the compiler finds no shorter order for the memory that some ranks have more."""
    shared = COSTS.with_split_head(12.0, RANKS)
    auto = sharing(named(AUTO, RANKS, MICROBATCHES))
    source = Source(auto, CostModel(lambda placement: shared if placement.splits_head else COSTS))
    least = (30.0,) * RANKS
    found, lower = (simulate(source.schedule(MICROBATCHES, have), shared) for have in (free, least))
    assert keeps(found, free)
    assert keeps(found, least) is not is_shorter
    assert (found.makespan < lower.makespan) is is_shorter
    assert found.makespan <= lower.makespan  # the compiler alone would find a longer one in the second case
