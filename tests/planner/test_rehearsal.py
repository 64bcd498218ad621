"""A pipeline from what its ranks measured: who stands in for whom, and what is added to their seconds."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp_ext import processor
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.planner.rehearsal import (
    chosen_ranks,
    described,
    disturbance,
    put_together,
    require_quiet,
    seconds,
    stand_in,
)
from megatron_pp_ext.processor import ProcessorTime
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import HeadCosts, StageCosts
from megatron_pp_ext.schedule.formats import rehearsal_file
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective, RankRehearsal
from megatron_pp_ext.schedule.simulate import simulate

RANKS, MICROBATCHES = 4, 6
SCHEDULE = catalog.build("zb-h1", RANKS, MICROBATCHES)


def measured(rank: int) -> RankRehearsal:
    """Rank r takes r + 1 seconds for each action."""
    return RankRehearsal(
        rank=rank,
        schedule=SCHEDULE.name,
        digest=SCHEDULE.digest,
        layers=(2, 2, 2, 2),
        stages=(StageCosts(rank + 1, rank + 1, rank + 1, 10.0, 4.0),),
        collectives=(),
        message_bytes=1000,
        outside_seconds=rank / 10,
        peak_activation_bytes=100 + rank,
        weight_bytes=1,
        gradient_bytes=2,
        optimizer_bytes=3,
    )


def on_two(schedule, **changed) -> dict[int, RankRehearsal]:
    """Two ranks that take a second for each action."""
    alike = {"digest": schedule.digest, "layers": (1, 1), "stages": (StageCosts(1, 1, 1, 1.0),), **changed}
    return {rank: replace(measured(0), rank=rank, **alike) for rank in range(2)}


def test_a_file_keeps_it_all(tmp_path: Path) -> None:
    one = replace(
        measured(2),
        collectives=(Collective(0, "F", "gather", 8, 2, 1),),
        device_bytes=7,
        head=HeadCosts(2.0, 1.0, 3.0),
    )
    rehearsal_file.write(one, tmp_path / "2.json")
    assert rehearsal_file.read(tmp_path / "2.json") == one


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("first,middle,last", [0, 4, 7]), ("all", list(range(8))), ("3,0", [0, 3]), ("last,7", [7])],
)
def test_chosen(words: str, ranks: list[int]) -> None:
    assert chosen_ranks(words, 8) == ranks


@pytest.mark.parametrize("words", ["8", "-1", "", "midle", "0,,1"])
def test_no_such_rank(words: str) -> None:
    with pytest.raises(ValueError, match=r"--ranks got .*, but takes first, middle, last, all or numbers"):
        chosen_ranks(words, 8)


def test_the_middle_stands_for_the_others() -> None:
    assert [stand_in(rank, [0, 4, 7], 8) for rank in range(8)] == [0, 4, 4, 4, 4, 4, 4, 7]
    assert [stand_in(rank, [0, 3], 4) for rank in range(4)] == [0, 0, 3, 3]


def test_ranks_wait_for_whoever_is_slower() -> None:
    """Two ranks in turn slow and quick, never both: on average as quick as ever, and yet a longer step."""
    schedule = catalog.build("1f1b", 2, 8)
    length = len(schedule.orders[0])
    turns = [tuple(1 + 0.5 * (-1) ** (place + late) for place in range(length)) for late in (0, 1)]
    even = on_two(schedule)
    uneven = {rank: replace(one, ratios=(turns[rank],)) for rank, one in even.items()}
    calm, hasty = (put_together(found, schedule, None, 2) for found in (even, uneven))
    assert calm.pipeline_seconds == calm.timeline.makespan == simulate(schedule, calm.timeline.costs).makespan
    assert hasty.timeline.makespan == calm.timeline.makespan
    assert hasty.pipeline_seconds > 1.05 * calm.pipeline_seconds
    assert hasty.step_seconds == hasty.pipeline_seconds + hasty.outside_seconds


def test_the_median_of_measured_steps() -> None:
    length = len(SCHEDULE.orders[0])
    steps = tuple((factor,) * length for factor in (1.0, 3.0, 2.0))
    found = {rank: replace(measured(rank), ratios=steps) for rank in range(RANKS)}
    rehearsal = put_together(found, SCHEDULE, None, RANKS)
    assert rehearsal.pipeline_seconds == pytest.approx(2 * rehearsal.timeline.makespan)


def test_stand_ins_take_other_steps() -> None:
    """A slow moment of the rank in the middle is not one of all ranks that it stands for."""
    length = len(SCHEDULE.orders[1])
    slow = ((2.0,) * length, (1.0,) * length)
    found = {rank: replace(measured(0), rank=rank, ratios=slow) for rank in (0, 1, 3)}
    rehearsal = put_together(found, SCHEDULE, None, RANKS)
    assert rehearsal.timeline.makespan < rehearsal.pipeline_seconds < 2 * rehearsal.timeline.makespan


def test_all_ranks_put_together() -> None:
    found = {rank: measured(rank) for rank in range(RANKS)}
    rehearsal = put_together(found, SCHEDULE, None, RANKS)
    # The last rank is the slowest: it waits for the first microbatch, and then does all three things to each.
    assert rehearsal.timeline.makespan >= 1 + 2 + 3 + 3 * 4 * MICROBATCHES
    assert rehearsal.step_seconds == rehearsal.timeline.makespan + 0.3
    assert [rank.activations for rank in rehearsal.ranks] == [100, 101, 102, 103]
    waiting = simulate(SCHEDULE, rehearsal.timeline.costs).peak_messages
    assert rehearsal.timeline.costs.message == 1000
    assert [rank.messages for rank in rehearsal.ranks] == [1000 * messages for messages in waiting]
    assert rehearsal.ranks[2].total == 1 + 2 + 3 + 102 + 1000 * waiting[2]


def test_a_stand_in_s_peak_is_the_simulated_one() -> None:
    found = {rank: measured(rank) for rank in (0, 2, 3)}
    rehearsal = put_together(found, SCHEDULE, None, RANKS)
    assert [rank.rehearsed_on for rank in rehearsal.ranks] == [0, 2, 2, 3]
    expected = simulate(SCHEDULE, rehearsal.timeline.costs).peak_activations[1]
    assert [rank.activations for rank in rehearsal.ranks] == [100, expected, 102, 103]
    assert rehearsal.timeline.costs.stages[1] == measured(2).stages[0]


SYSTEM = System(
    name="test",
    gpus_per_node=8,
    memory_bytes=1.0,
    matrix_rates={"fp32": [[1, 1, 1, 1.0]]},
    copy_bytes_per_second=1.0,
    node=Link(1000.0, 0.5),
    network=Link(100.0, 2.0),
    all_reduce=[[2, 64, 0.25]],
    sustained={"network": 0.5},
)


def test_a_system_adds_messages_and_collectives() -> None:
    asked = (Collective(0, "F", "all_reduce", 64, 2, 1), Collective(0, "W", "gather", 64, 2, 1))
    found = {rank: replace(measured(rank), collectives=asked) for rank in range(RANKS)}
    within = put_together(found, SCHEDULE, SYSTEM, 8).timeline.costs
    assert within.hop == 0.5 + 1000 / 1000
    assert within.stages[1] == StageCosts(2.25, 2, 2.125, 10.0, 4.0)
    between = put_together(found, SCHEDULE, SYSTEM, 16).timeline.costs
    assert between.hop == 2.0 + 1000 / (0.5 * 100), "the rate that training keeps up"


def test_a_pair_hides_the_exchanges_of_tokens() -> None:
    """It hides those of both actions.  Another collective takes its time; without a system none takes any."""
    links = Link(1e3, 0.0)
    system = System(
        "test", 8, 1e9, {"bf16": [[1, 1, 1, 1e12]]}, 1e12, links, links, peak_rates={"bf16": 1e12}
    )
    schedule = catalog.build("1f1b", 2, 8, paired=True)
    exchanges = [Collective(0, kind, "all_to_all", 100, 2, 1) for kind in "FFBB"]
    found = on_two(schedule, collectives=(*exchanges, Collective(0, "F", "gather", 100, 2, 1)))
    hidden = sum(seconds(exchange, system) for exchange in exchanges)
    gathered = seconds(found[0].collectives[-1], system)
    assert hidden > 0 and gathered > 0
    costs = put_together(found, schedule, system, 2).timeline.costs
    assert costs.pair == pytest.approx(1 - hidden / (3 + hidden + gathered))
    assert put_together(found, schedule, None, 2).timeline.costs.pair == 1
    alone = catalog.build("1f1b", 2, 8)
    other = {rank: replace(one, digest=alone.digest) for rank, one in found.items()}
    assert put_together(other, alone, system, 2).timeline.costs.pair == 1


def test_a_shared_vocabulary_is_simulated_with_the_ranks_parts() -> None:
    schedule = share(lambda microbatches: catalog.build("zb-h1", RANKS, microbatches), MICROBATCHES)
    gathered = (Collective(0, "S", "gather", 64, 2, 1),)
    found = {
        rank: replace(
            measured(rank),
            digest=schedule.digest,
            head=HeadCosts(rank + 1, 2.0, 5.0),
            collectives=gathered,
            ratios=(tuple(1.0 + (action.kind is Kind.S) for action in schedule.orders[rank]),),
        )
        for rank in range(RANKS)
    }
    rehearsal = put_together(found, schedule, SYSTEM, 8)
    hop = 0.5 + 1000 / 1000
    expected = HeadCosts(2.5 + 0.125, 2.0, 5.0, hidden=hop, sums=2 * hop)
    assert rehearsal.timeline.costs.head == expected
    slow = replace(rehearsal.timeline.costs, head=replace(expected, scores=2 * expected.scores))
    assert rehearsal.pipeline_seconds == pytest.approx(simulate(schedule, slow).makespan)


def test_refusals() -> None:
    found = {rank: measured(rank) for rank in (0, 3)}
    with pytest.raises(ValueError, match="rank 3 rehearsed another schedule than rank 0"):
        put_together(found | {3: replace(found[3], digest="other")}, SCHEDULE, None, 4)
    uneven = {rank: replace(one, layers=(1, 2, 3, 3)) for rank, one in found.items()}
    with pytest.raises(ValueError, match=r"rank 1 has stages of \[2\] layers and rank 0, which would stand"):
        put_together(uneven, SCHEDULE, None, 4)


QUIET = RankRehearsal(
    rank=1, schedule="1f1b", digest="", layers=(1, 1), stages=(StageCosts(1.0, 1.0, 1.0, 1.0),),
    collectives=(), message_bytes=8, outside_seconds=0.5, peak_activation_bytes=1, weight_bytes=1,
    gradient_bytes=1, optimizer_bytes=1, step_seconds=(2.0, 2.1, 2.0, 2.2), waited=0.01, load=0.5,
)  # fmt: skip


def test_a_quiet_machine_is_believed_and_described() -> None:
    other = replace(QUIET, rank=2, step_seconds=(2.0, 2.0, 2.0, 2.0), waited=0.02, load=0.6)
    require_quiet([QUIET, other])
    assert disturbance([QUIET, other]) is None
    assert described([QUIET, other]) == (
        "timed steps spread most on rank 1, where the middle half of 4 took 2 to 2.125 s; ranks waited for a "
        "processor for up to 2.0% of their time; the machine's load was up to 0.6 a processor"
    )


def test_steps_from_2_to_30_s_are_not_believed() -> None:
    """A 1F1B step of 2 to 6 s was once rehearsed as 29.8 s."""
    uneven = replace(QUIET, step_seconds=(2.0, 6.0, 29.8, 31.0))
    with pytest.raises(
        ValueError, match=r"not to be believed: the middle half of the steps of rank 1 spread"
    ):
        require_quiet([replace(QUIET, rank=0), uneven])


def test_steps_that_are_all_as_slow_are_not_believed_where_they_waited() -> None:
    slow = replace(QUIET, rank=3, step_seconds=(29.8, 29.8), waited=0.8)
    with pytest.raises(ValueError, match=r"rank 3 waited for a processor for 80% of its time, more than 10%"):
        require_quiet([slow])


def test_one_late_step_of_many_does_not_count() -> None:
    require_quiet([replace(QUIET, step_seconds=(2.0,) * 9 + (10.0,))])


@pytest.mark.parametrize("steps", [(), (2.0,)])
def test_a_system_that_tells_nothing(steps: tuple[float, ...]) -> None:
    unknown = replace(QUIET, step_seconds=steps, waited=None, load=None)
    require_quiet([unknown])
    assert described([unknown]) == "too few timed steps to tell how they spread"


def test_waits_are_those_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(processor, "_SCHEDSTAT", file)
    before = ProcessorTime.now()
    assert ProcessorTime.now().waited_since(before) is None
    file.write_text("1000 500 7\n")
    before = ProcessorTime.now()
    file.write_text("4000 1500 9\n")
    assert ProcessorTime.now().waited_since(before) == 0.25


def test_a_system_without_load_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.os, "getloadavg", lambda: (4.0, 1.0, 1.0))
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 8)
    assert processor.load() == 0.5
    monkeypatch.delattr(processor.os, "getloadavg")
    assert processor.load() is None
