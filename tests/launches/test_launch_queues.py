"""The model of launch queues on launches made up by hand, with the circles that it finds."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.launches import synchronizations
from tests.support.launches.entries import Collective, HostWait, Kernel, Transfer, Wait
from tests.support.launches.hardware import Setting
from tests.support.launches.queues import circle

EVERY = [
    Setting(queues, sends_wait, stream_a_pair, foreign_streams)
    for queues, sends_wait, stream_a_pair, foreign_streams in product(
        (1, 2, 8, 32), (True, False), (True, False), (None, 6)
    )
]


def send(peer, group="line"):
    return Transfer(group, peer, is_send=True)


def receive(peer, group="line"):
    return Transfer(group, peer, is_send=False)


def test_a_receive_that_waits_for_the_one_before_it_blocks_the_queue():
    """Each rank computes behind its second receive what the other waits for, as with two posted ahead."""
    ranks = [
        (
            receive(1 - rank, comes),
            receive(1 - rank, comes),
            Kernel("first"),
            send(1 - rank, goes),
            Wait(0),
            Kernel("second"),
            send(1 - rank, goes),
            Wait(1),
        )
        for rank, (comes, goes) in enumerate((("up", "down"), ("down", "up")))
    ]
    assert circle(ranks, Setting(1)).splitlines() == [
        "rank 0, launch 0: receive from 1 (up) waits for rank 1, launch 3: send to 0 (up)",
        "rank 1, launch 3: send to 0 (up) waits for rank 1, launch 2: kernel first",
        "rank 1, launch 2: kernel first stands in queue 0 behind rank 1, launch 1: receive from 0 (down)",
        "rank 1, launch 1: receive from 0 (down) waits for rank 1, launch 0: receive from 0 (down)",
        "rank 1, launch 0: receive from 0 (down) waits for rank 0, launch 3: send to 1 (down)",
        "rank 0, launch 3: send to 1 (down) waits for rank 0, launch 2: kernel first",
        "rank 0, launch 2: kernel first stands in queue 0 behind rank 0, launch 1: receive from 1 (up)",
        "rank 0, launch 1: receive from 1 (up) waits for rank 0, launch 0: receive from 1 (up)",
    ]
    assert circle(ranks, Setting(3)) == ""
    assert circle(ranks, Setting(3, foreign_streams=0)) == ""
    assert "stands in queue 0 behind" in circle(ranks, Setting(3, foreign_streams=2)), "shared with compute"
    assert circle([ranks[0][1:3], ranks[1][3:4]], Setting(1)) == "", "one receive alone blocks nobody"


def test_messages_that_cross_on_one_stream():
    """Both ranks send first, which works if sends leave at once."""
    ranks = [(send(1), receive(1)), (send(0), receive(0))]
    assert circle(ranks, Setting(32)).splitlines() == [
        "rank 0, launch 0: send to 1 (line) waits for rank 1, launch 1: receive from 0 (line)",
        "rank 1, launch 1: receive from 0 (line) waits for rank 1, launch 0: send to 0 (line)",
        "rank 1, launch 0: send to 0 (line) waits for rank 0, launch 1: receive from 1 (line)",
        "rank 0, launch 1: receive from 1 (line) waits for rank 0, launch 0: send to 1 (line)",
    ]
    assert circle(ranks, Setting(32, sends_wait=False)) == ""


def test_peers_that_share_the_stream_of_a_group():
    ranks = [
        (Kernel("first"), send(2, "down")),
        (receive(2, "up"), Wait(0), Kernel("third"), send(2, "down")),
        (receive(1, "down"), receive(0, "down"), Wait(1), Kernel("second"), send(1, "up"), Wait(0)),
    ]
    assert circle(ranks, Setting(32)) == ""
    text = circle(ranks, Setting(32, stream_a_pair=False))
    assert "rank 2, launch 1: receive from 0 (down) waits for rank 2, launch 0: receive from 1 (down)" in text


def test_messages_are_launched_behind_the_compute_stream():
    """The send needs no result, but stands behind a wait for a message that only comes after it."""
    ranks = [(receive(1, "up"), Wait(0), send(1, "down")), (receive(0, "down"), Wait(0), send(0, "up"))]
    assert "compute stream's wait" in circle(ranks, Setting(32, sends_wait=False))


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_collectives_in_another_order_on_one_of_their_ranks(is_waited_for):
    """Two collectives may be under way together, unless compute waits for the first before the second."""
    sum_, gather = (Collective(group, (0, 1), group, is_waited_for) for group in ("sum", "gather"))
    for setting in EVERY:
        assert circle([(sum_, gather), (sum_, gather)], setting) == ""
        text = circle([(sum_, gather), (gather, sum_)], setting)
        assert (text != "") == is_waited_for
    assert circle([(sum_,), ()], Setting()).endswith("collective sum (sum) waits for what nobody launches")


def test_a_host_that_waits_launches_nothing_more():
    kernel_only, everything = (
        [
            (receive(1, "up"), Kernel("first"), wait, send(1, "down")),
            (receive(0, "down"), Wait(0), Kernel("second"), send(0, "up")),
        ]
        for wait in (HostWait(1), HostWait())
    )
    for setting in EVERY:
        assert circle(kernel_only, setting) == ""
        text = circle(everything, setting)
        assert "rank 0, launch 3: send to 1 (down) is not launched before rank 0, launch 2: synchron" in text


def test_a_message_without_its_other_end_is_named():
    assert circle([(Kernel("only"), send(1)), ()], Setting()) == (
        "rank 0, launch 1: send to 1 (line) waits for what nobody launches"
    )
    assert circle([(Kernel("only"), send(1)), ()], Setting(sends_wait=False)) == ""
    assert circle([(), (receive(0),)], Setting(sends_wait=False)).endswith("what nobody launches")


def test_where_the_device_is_synchronized():
    launches = (Kernel("0F0"), send(1), Kernel("0F1"), Kernel("0F1"), Wait(1), Kernel("0B0"), HostWait(4))
    sync = HostWait()
    assert synchronizations.before_every_action(launches) == (
        *(sync, Kernel("0F0"), send(1), sync, Kernel("0F1"), Kernel("0F1")),
        *(Wait(2), sync, Kernel("0B0"), HostWait(6)),
    )
    assert synchronizations.before_the_first_of_each_kind(launches) == (
        *(sync, Kernel("0F0"), send(1), Kernel("0F1"), Kernel("0F1")),
        *(Wait(2), sync, Kernel("0B0"), HostWait(5)),
    )
    assert synchronizations.before_every_launch(launches) == (
        *(sync, Kernel("0F0"), sync, send(1), sync, Kernel("0F1"), sync, Kernel("0F1")),
        *(sync, Wait(3), sync, Kernel("0B0"), HostWait(9)),
    )


@st.composite
def pipelines(draw):
    """Draw kernels and messages of a few ranks in one line, and then move some launches out of it."""
    ranks = draw(st.integers(2, 3))
    random = draw(st.randoms(use_true_random=False))
    launches = [[] for _ in range(ranks)]
    for _ in range(draw(st.integers(1, 12))):
        one, other = random.sample(range(ranks), 2)
        if random.random() < 0.5:
            launches[one].append(Kernel("work"))
        group = "down" if one < other else "up"
        launches[one].append(send(other, group))
        launches[other].append(receive(one, group))
        if random.random() < 0.5:
            launches[other].append(Wait(len(launches[other]) - 1))
    for rank in launches:
        if random.random() < 0.4:
            at = random.randrange(len(rank) + 1)
            rank[at:] = [entry for entry in rank[at:] if not isinstance(entry, Wait)]
            random.shuffle(tail := rank[at:])
            rank[at:] = tail
    return tuple(map(tuple, launches))


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_the_strictest_setting_stands_for_all(pipeline):
    """A pipeline that finishes in the strictest setting finishes in all others.

    The strictest has a synchronization before every launch and sends that wait, so that a launch is done
    before the next of its rank starts.  Suppose that launches do not finish in another setting, and take the
    one of them that finished first in the strictest.  All before it on its rank finish, so neither host,
    queue, stream nor event holds it up.  Those that it meets had started in the strictest, so all before them
    on their ranks were done there, hence are done here too: they start, and the launch finishes.
    """
    if circle(tuple(map(synchronizations.before_every_launch, pipeline)), Setting(1)) == "":
        for setting, synchronized in product(EVERY, synchronizations.ALL):
            assert circle(tuple(map(synchronized, pipeline)), setting) == ""


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.sampled_from(EVERY), st.sampled_from(synchronizations.ALL))
def test_sends_that_leave_at_once_only_help(pipeline, setting, synchronized):
    ranks = tuple(map(synchronized, pipeline))
    if circle(ranks, replace(setting, sends_wait=True)) == "":
        assert circle(ranks, replace(setting, sends_wait=False)) == ""
