"""All ranks launch in one line, and receives are posted where the line has their messages' senders."""

from dataclasses import replace

import pytest
from hypothesis import given

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Announced, Kind, Orders, Schedule, delivers
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.launch_order import launch_order
from megatron_pp_ext.schedule.messages import Message, incoming_message, outgoing_message
from megatron_pp_ext.schedule.placement import linear, v
from tests.support import slow
from tests.support.receives import posted_receives

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (1, p, 3 * p)]


def require_one_line(orders: Orders) -> None:
    """Assert that the launches of every rank are as the proof in ``schedule.messages`` requires.

    They are so whichever messages announce their shapes.
    """
    for announced in Announced:
        _require_one_line(replace(orders, announced=announced))


def _require_one_line(orders: Orders) -> None:
    line, by_rank = [(rank, action) for _, rank, action in launch_order(orders)], orders.by_rank
    assert [action for rank, action in line if rank == 0] == list(by_rank[0])
    assert sorted(line) == sorted((rank, action) for rank, order in enumerate(by_rank) for action in order)
    place = {delivers(action): at for at, (_, action) in enumerate(line)}
    posted = posted_receives(orders)
    sent: dict[Message, int] = {}
    for rank, action in line:
        message = outgoing_message(action, orders.stages)
        if message and orders.rank_of(message.receiver, message.microbatch) != rank:
            sent[message] = rank
    received: dict[Message, int] = {}
    for rank, order in enumerate(by_rank):
        launches: list[int] = []
        here: set[Message] = set()
        for at, arrivals in enumerate(posted[rank]):
            for peer, message in arrivals:
                assert sent[message] == peer and message not in received
                received[message] = rank
                here.add(message)
                kind = Kind.F if message.sender < message.receiver else Kind.I
                launches.append(place[Action(message.sender, kind, message.microbatch)])
            if at < len(order):
                launches.append(place[delivers(order[at])])
                wanted = incoming_message(order[at], orders.stages)
                assert wanted in here or wanted not in sent or sent[wanted] == rank
        assert launches == sorted(launches), f"rank {rank} leaves the line"
        assert len(set(launches)) == len(launches)
    assert received.keys() == sent.keys()


def check_schedule(schedule: Schedule) -> None:
    require_one_line(Orders.of(schedule))


@pytest.mark.parametrize("name", catalog.NAMES)
def test_families(name: str) -> None:
    for ranks, microbatches in SIZES:
        schedule = catalog.build(name, ranks, microbatches)
        check_schedule(schedule)
        check_schedule(catalog.forward_only(schedule.placement, microbatches))


@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (3, 2), (4, 1), (4, 4), (8, 3)])
def test_a_pipeline_that_never_flushes(ranks: int, interval: int) -> None:
    """The receive of a message is posted in the update that sends it, though a later one takes it."""
    steps = [pipedream.step(Replicas.straight(ranks), interval, update, 6) for update in range(6)]
    for step in steps:
        require_one_line(Orders(step, linear(ranks)))
    in_flight = []
    for step in steps:
        (posted, order) = posted_receives(Orders(step, linear(ranks)))[1], step[1]
        taken = {incoming_message(action, ranks) for action in order}
        in_flight.append([m for arrivals in posted for _, m in arrivals if m not in taken])
    assert all(in_flight[:2]) and not in_flight[-1]  # the last updates drain the pipeline


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 2, 1), (2, 3, 2)])
def test_replicated_stages(counts: tuple[int, ...]) -> None:
    replicas = Replicas(counts)
    for microbatches in (1, 4, 9):
        require_one_line(replicas.placed(pipedream.orders(replicas, microbatches)))


@given(slow.schedules())
def test_random_valid_orders(schedule: Schedule) -> None:
    check_schedule(schedule)


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        (Announced.NOTHING, {"1F0": [0, 1], "1B0": [], "1F1": [], "1B1": [], "1F2": [2], "1B2": []}),
        (Announced.EVERY, {"1F0": [0], "1B0": [], "1F1": [1], "1B1": [], "1F2": [2], "1B2": []}),
    ],
)
def test_a_receive_is_posted_before_the_action_in_which_its_message_comes(
    announced: Announced, expected: dict[str, list[int]]
) -> None:
    """On two ranks under 1F1B, F1 arrives on rank 1 during its F0, and F2 while the rank is idle.

    Where F1 announces its shape, its receive would hold up F0, and B0 if F1 were longer.
    """
    schedule = catalog.build("1f1b", 2, 3)
    *posted, _ = posted_receives(Orders.of(schedule, announced))[1]
    by_action = zip(map(str, schedule.orders[1]), posted, strict=True)
    found = {action: [message.microbatch for _, message in arrivals] for action, arrivals in by_action}
    assert found == expected


def test_ranks_that_wait_for_each_other_are_told() -> None:
    """Rank 0 needs the gradient before it has sent the forward that leads to it."""
    orders = ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0), Action(1, Kind.B, 0)))
    with pytest.raises(InvalidSchedule, match="wait for each other"):
        posted_receives(Orders(orders, linear(2)))


def test_a_rank_that_knows_a_microbatch_is_told_no_shape_again() -> None:
    placement = v(3)
    found = {}
    for announced in Announced:
        orders = Orders((), placement, announced=announced)
        found[announced] = [
            (orders.is_announced(stage, 0), orders.is_repeated(stage, 0))
            for stage in range(1, placement.stages)
        ]
    told, repeated, nothing = (True, False), (False, True), (False, False)
    assert found == {
        Announced.NOTHING: [nothing] * 5,
        Announced.FIRST: [told, told, repeated, repeated, repeated],
        Announced.EVERY: [told] * 5,
    }
