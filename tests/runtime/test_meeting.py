"""Ranks that exchange messages meet, each way, in one order on all ranks, before a schedule asks them to."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.groups import direction_groups
from tests.support.ranks import run_ranks


def meetings(rank: int, ranks: int, edges: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """(sender, receiver, group) of what this rank exchanged, in its order."""
    dist.init_process_group("gloo")
    seen = []
    send, receive = dist.send, dist.recv

    def watched_send(tensor, to, group):
        seen.append((rank, to, group.group_desc))
        send(tensor, to, group=group)

    def watched_receive(tensor, source, group):
        seen.append((source, rank, group.group_desc))
        receive(tensor, source, group=group)

    dist.send, dist.recv = watched_send, watched_receive
    direction_groups(list(range(ranks)), edges=edges)
    return seen


@pytest.mark.parametrize(
    ("ranks", "edges"), [(1, []), (2, []), (3, []), (4, []), (5, [(3, 0), (1, 3), (0, 3), (2, 1), (4, 4)])]
)
def test_all_who_exchange_messages_meet(ranks: int, edges: list[tuple[int, int]]) -> None:
    """Neighbours do, the pipeline's ends, and the pairs that the caller names."""
    by_rank = run_ranks(meetings, ranks, ranks, edges)
    pairs = {(rank, (rank + 1) % ranks) for rank in range(ranks)}.union(edges)
    expected = {
        (sender, receiver, "PIPELINE_DOWN" if sender < receiver else "PIPELINE_UP")
        for pair in pairs
        for sender, receiver in (pair, pair[::-1])
        if sender != receiver
    }
    assert {one for seen in by_rank for one in seen} == expected
    for rank, seen in enumerate(by_rank):
        assert len(seen) == len(set(seen)) == sum(rank in one[:2] for one in expected)
        # One group after the other: a communicator of all its ranks needs the first message of each of them.
        assert [group for *_, group in seen] == sorted(group for *_, group in seen)
    # One order that all ranks keep: whoever comes first in it is never waited for by the one before.
    done: set[tuple[int, int, str]] = set()
    while len(done) < len(expected):
        heads = [next((one for one in seen if one not in done), None) for seen in by_rank]
        ready = {one for one in heads if one and heads.count(one) == 2}
        assert ready, f"ranks wait for each other in a circle: {heads}"
        done |= ready


def wait_for_nothing(rank: int) -> str:
    """Rank 1 waits for a message that rank 0 does not send.

    The ranks meet before the groups are made, whose own meeting has to be over within the timeout, too.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    down, _ = direction_groups([0, 1], timeout=timedelta(seconds=5))
    if rank == 0:
        return ""
    with pytest.raises(RuntimeError) as error:
        down.recv([torch.empty(1)], 0, 0).wait()
    return str(error.value)


def test_a_message_that_never_comes_times_out() -> None:
    _, said = run_ranks(wait_for_nothing, 2)
    assert "Timed out" in said
