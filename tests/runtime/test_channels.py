"""Messages between two ranks: what arrives is what was sent, and what is wrong with one is said."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.stand_in_channels import MadeUpChannels, MadeUpExchanges
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message, outgoing_message
from tests.support.ranks import run_ranks

SHAPE = (3, 2, 4)
NUMBERS = torch.arange(24.0).reshape(SHAPE)


def message(microbatch: int) -> Message:
    found = outgoing_message(Action(0, Kind.F, microbatch), 2)
    assert found is not None
    return found


def channels(shape: tuple[int, ...] = SHAPE) -> Channels:
    dist.init_process_group("gloo")
    groups = direction_groups([0, 1])
    return Channels([0, 1], *groups, shape, torch.float, torch.device("cpu"))


def exchange(rank: int, tensors: list[torch.Tensor], shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Send ``tensors`` from rank 0 to rank 1, one after the other; what rank 1 got."""
    ends = channels(shape)
    got = []
    for number, tensor in enumerate(tensors):
        if rank == 0:
            ends.send(1, tensor)
        else:
            ends.post(0, message(number))
            got.append(ends.receive(0, message(number)))
    ends.close()
    return got


def test_numbers_arrive_whatever_their_strides() -> None:
    transposed = NUMBERS.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    every_second = torch.stack([NUMBERS, -NUMBERS], dim=-1)[..., 0]
    assert not transposed.is_contiguous() and not every_second.is_contiguous()
    sent = [NUMBERS, transposed, every_second, NUMBERS[:, :1].expand(SHAPE)]
    _, got = run_ranks(exchange, 2, sent, SHAPE)
    assert all(map(torch.equal, got, sent))


def test_each_message_may_have_its_own_shape() -> None:
    sent = [NUMBERS, NUMBERS.reshape(1, 2, 12), NUMBERS[:2], NUMBERS.reshape(12, 2, 1)]
    _, got = run_ranks(exchange, 2, sent, ())
    assert [one.shape for one in got] == [one.shape for one in sent]
    assert all(map(torch.equal, got, sent))


def refuse_other_shape(rank: int) -> str:
    ends = channels()
    with pytest.raises(ValueError) as error:
        ends.send(1 - rank, torch.zeros(2, 3, 4))
    return str(error.value)


def test_another_shape_of_as_many_numbers_is_refused() -> None:
    """Sequence and batch have changed places: the numbers would arrive, as noise."""
    for said in run_ranks(refuse_other_shape, 2):
        assert "message of shape (2, 3, 4) where (3, 2, 4) was agreed" in said


class Network(Channels):
    """Channels over a network whose messages are over when the test says so."""

    def __init__(self, shape: tuple[int, ...] = SHAPE) -> None:
        self._shape, self._dtype, self._device = shape, torch.float, torch.device("cpu")
        self._wire, self._through_host = torch.device("cpu"), False
        self._posted, self._sending = {}, deque()
        self.waited: list[int] = []
        self.sent = 0

    def _work(self, number: int, fails: bool = False) -> SimpleNamespace:
        def wait() -> None:
            self.waited.append(number)
            if fails:
                raise RuntimeError("the connection is lost")

        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        self._sending.append((self._work(self.sent, fails=tensor.sum() < 0), tensor))  # type: ignore[arg-type]
        self.sent += 1

    def _receive(self, peer, shape, dtype):
        return torch.zeros(shape), self._work(-1)


def test_few_messages_are_on_their_way() -> None:
    """A rank that is ahead waits for its oldest message, and learns what became of it."""
    ends = Network()
    for number in range(SENDS_AHEAD + 3):
        ends.send(1, NUMBERS)
        assert ends.waited == list(range(number + 1 - SENDS_AHEAD))
    ends.close()
    assert ends.waited == list(range(SENDS_AHEAD + 3))
    ends.send(1, -NUMBERS)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        ends.close()


def test_a_message_is_waited_for() -> None:
    ends = Network()
    ends.post(1, message(0))
    assert ends.waited == []
    ends.receive(1, message(0))
    assert ends.waited == [-1]


def test_a_message_that_nobody_took_ends_the_step() -> None:
    ends = Network()
    ends.post(1, message(4))
    with pytest.raises(RuntimeError, match=r"messages that no action took by the end of the step: .*4"):
        ends.close()


def test_only_what_was_posted_can_be_taken() -> None:
    ends = Network()
    with pytest.raises(ValueError, match=r"no receive of .* from rank 1 is posted"):
        ends.receive(1, message(0))
    ends.post(1, message(0))
    with pytest.raises(ValueError, match=r"is posted already; post each message once"):
        ends.post(1, message(0))
    with pytest.raises(ValueError, match=r"no receive of .* from rank 2 is posted"):
        ends.receive(2, message(0))


def made_up(rank: int) -> tuple[int, bool]:
    dist.init_process_group("gloo")
    ends = MadeUpChannels([0], dist.group.WORLD, dist.group.WORLD, SHAPE, torch.float, torch.device("cpu"))
    got = []
    for number in range(3):
        ends.post(1, message(number))
        got.append(ends.receive(1, message(number)))
    places = {one.untyped_storage().data_ptr() for one in got}
    return len(places), all(bool(one.any() and one.isfinite().all()) for one in got)


def test_made_up_messages_take_the_memory_of_real_ones() -> None:
    """A rehearsal measures memory: what is received is a tensor of its own, as it would be in a real run."""
    assert run_ranks(made_up, 1) == [(3, True)]


def made_up_exchanges(rank: int) -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    exchanges = MadeUpExchanges(world, world, rows=50)
    tokens, numbers = torch.full((400,), -1), torch.full(SHAPE, torch.nan)
    for home in (0, 1):
        exchanges.spread(tokens, home).wait()
        exchanges.spread(numbers, home).wait()
        # What rank 0 spreads itself is as it was.
        assert bool((tokens == -1).all()) is bool(numbers.isnan().all()) is (home == 0)
    assert 0 <= tokens.min() < 5 < 45 < tokens.max() < 50
    assert numbers.any() and numbers.isfinite().all()
    whole, gathering = exchanges.gather(NUMBERS)
    gathering.wait()
    assert torch.equal(whole, NUMBERS[None])
    mine = NUMBERS.clone()
    exchanges.sum_up(mine, 1).wait()
    assert torch.equal(mine, NUMBERS)


def test_made_up_exchanges_are_numbers_to_compute_with() -> None:
    run_ranks(made_up_exchanges, 1)
