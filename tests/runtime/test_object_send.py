"""Trees of tensors arrive as they were sent, in one message each while their form stays the same."""

import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.object_send import ObjectSend
from tests.support.ranks import run_ranks

LOSS = torch.tensor([1.5, 7.0])
TREES = [
    [{"lm loss": LOSS}, {"lm loss": 2 * LOSS}],
    [{"lm loss": 3 * LOSS}, {"lm loss": float("nan") * LOSS}],
    # Sizes that do not begin at multiples of eight, a transposed matrix, a scalar, no elements, no tensor.
    ([torch.tensor(True), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()], {"n": torch.tensor(3)}),
    ([], {"empty": torch.zeros(0), "no tensor": 7, "long": torch.tensor(2**40)}),
    [],
    [],
]
MESSAGES = [2, 1, 2, 2, 2, 1]
"""One for the form where it is another one, and one for the numbers."""


SAME_LENGTH = [{"lm loss": LOSS}, {"mm loss": LOSS}, {"mm loss": LOSS.flip(0)}]
"""Names of as many letters, as of two auxiliary losses."""


def exchange(rank: int, trees: list) -> tuple[list, list[int]]:
    dist.init_process_group("gloo")
    connection = ObjectSend(0, 1, dist.group.WORLD, torch.device("cpu"))
    counts, send, receive = [], dist.send, dist.recv

    def counted(call):
        def call_and_count(*args, **kwargs):
            counts[-1] += 1
            return call(*args, **kwargs)

        return call_and_count

    dist.send, dist.recv = counted(send), counted(receive)
    got = []
    for tree in trees:
        counts.append(0)
        try:
            got.append(connection.send(tree=tree) if rank == 0 else connection.receive()["tree"])
        except ValueError as error:
            got.append(str(error))
    return got, counts


def test_trees_arrive() -> None:
    (_, sent), (got, received) = run_ranks(exchange, 2, TREES)
    assert sent == received == MESSAGES
    for tree, arrived in zip(TREES, got, strict=True):
        torch.testing.assert_close(arrived, tree, rtol=0, atol=0, equal_nan=True)


def test_a_form_of_the_same_length_is_another() -> None:
    _, (got, _) = run_ranks(exchange, 2, SAME_LENGTH)
    torch.testing.assert_close(got, SAME_LENGTH, rtol=0, atol=0)


def test_what_cannot_travel_ends_both_ends_with_its_name() -> None:
    """Neither waits for the other, and what comes behind it arrives."""
    trees = [*SAME_LENGTH[:1], [{"mm loss": LOSS}, {"note": [LOSS, lambda: LOSS]}], *SAME_LENGTH[:2]]
    (ended, sent), (got, received) = run_ranks(exchange, 2, trees)
    assert sent == received
    assert ended[1] == got[1]
    assert ended[1].startswith("tree[1]['note'][1] cannot be copied (")
    assert "has to go from rank 0, which computes it, to rank 1" in ended[1]
    assert "let the loss function return tensors, numbers, texts, and lists, tuples or dicts" in ended[1]
    torch.testing.assert_close([got[0], *got[2:]], [trees[0], *trees[2:]], rtol=0, atol=0)


def test_jagged_tensors_arrive_and_cost_a_message_while_their_lengths_stay() -> None:
    first, second = (
        torch.nested.nested_tensor([LOSS, scale * LOSS], layout=torch.jagged) for scale in (2.0, 3.0)
    )
    longer = torch.nested.nested_tensor([LOSS, LOSS.repeat(2)], layout=torch.jagged)
    trees = [[{"rewards": one}] for one in (first, second, longer)]
    _, (got, counts) = run_ranks(exchange, 2, trees)
    for tree, arrived in zip(trees, got, strict=True):
        torch.testing.assert_close(list(arrived[0]["rewards"]), list(tree[0]["rewards"]), rtol=0, atol=0)
    assert counts == [2, 1, 2]
