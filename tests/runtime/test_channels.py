"""Messages between two ranks: what arrives is what was sent, and what is wrong with one is said."""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Event, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.channels import LARGE, Channels, DummyChannels, OtherShape, _Sent
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message, outgoing_message
from tests.support.ranks import run_ranks

SHAPE = (3, 2, 4)
NUMBERS = torch.arange(24.0).reshape(SHAPE)


def message(microbatch: int) -> Message:
    found = outgoing_message(Action(0, Kind.F, microbatch), 2)
    assert found is not None
    return found


def channels(shape: tuple[int, ...] = SHAPE, shapes: Sequence[Sequence[int]] = ()) -> Channels:
    dist.init_process_group("gloo")
    groups = direction_groups([0, 1])
    return Channels([0, 1], *groups, shape, torch.float, torch.device("cpu"), shapes)


def exchange(rank: int, tensors: list[torch.Tensor], shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Send ``tensors`` from rank 0 to rank 1, one after the other; what rank 1 got."""
    ends = channels(shape)
    got = []
    for number, tensor in enumerate(tensors):
        if rank == 0:
            ends.send(1, message(number), tensor)
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


def post_all_at_once(rank: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what arrives where all receives are posted before any message is sent."""
    ends = channels((), [tensor.shape for tensor in tensors])
    if rank == 1:
        for number in range(len(tensors)):
            ends.post(0, message(number))
    dist.barrier()
    if rank == 0:
        for number, tensor in enumerate(tensors):
            ends.send(1, message(number), tensor)
    got = [ends.receive(0, message(number)) for number in range(len(tensors))] if rank == 1 else []
    ends.close()
    return got


def test_a_receive_whose_shape_is_known_does_not_stop_the_host() -> None:
    sent = [NUMBERS, NUMBERS[:2], NUMBERS.reshape(12, 2, 1)]
    _, got = run_ranks(post_all_at_once, 2, sent, timeout=60)
    assert all(map(torch.equal, got, sent))


LENGTH = LARGE // 4


def exchange_large(rank: int) -> list[float]:
    """Send eight large messages each way before the first is received, as a rank that is ahead does."""
    ends = channels((LENGTH,))
    for number in range(8):
        ends.post(1 - rank, message(number))
    for number in range(8):
        ends.send(1 - rank, message(number), torch.full((LENGTH,), 10.0 * rank + number))
    got = [ends.receive(1 - rank, message(number)) for number in range(8)]
    ends.close()
    assert all(one.min() == one.max() for one in got)
    return [one[0].item() for one in got]


def test_large_messages_arrive_in_their_order() -> None:
    assert run_ranks(exchange_large, 2) == [[10.0 + number for number in range(8)], [*map(float, range(8))]]


class Socket:
    """A process group that writes nothing before ``may_write``; messages of negative numbers are lost."""

    def __init__(self) -> None:
        self.may_write = Event()
        self.threads: list[int] = []
        self.sent: list[float] = []
        self.kept: list[weakref.ref[torch.Tensor]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert self.may_write.wait(10), "the caller waits for its own message"
        (tensor,) = tensors
        self.threads.append(get_ident())
        self.sent.append(tensor[0].item())
        self.kept.append(weakref.ref(tensor))

        def wait() -> None:
            if tensor[0] < 0:
                raise RuntimeError("the connection is lost")

        return SimpleNamespace(wait=wait, is_completed=lambda: False)


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Channels]]:
    """Make the channels of rank 0 of two over a ``Socket``; at the end no thread of theirs is left."""
    made: list[Channels] = []

    def make(socket: Any, numbers: int = LENGTH, backend: str = "gloo") -> Channels:
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        made.append(Channels([0, 1], socket, socket, (numbers,), torch.float, torch.device("cpu")))
        return made[-1]

    yield make
    for ends in made:
        if ends._sender is not None:
            ends._sender.shutdown()


def test_the_caller_goes_on_while_gloo_copies_a_large_message(over: Callable[..., Channels]) -> None:
    """One thread hands all of them to gloo, so that none passes another, and lets go of what has left."""
    socket = Socket()
    ends = over(socket)
    for number in range(SENDS_AHEAD):
        ends.send(1, message(number), torch.full((LENGTH,), float(number)))
    assert socket.sent == []
    socket.may_write.set()
    ends.close()
    assert socket.sent == [*range(SENDS_AHEAD)]
    assert len({*socket.threads, get_ident()}) == 2
    gc.collect()
    *before, _ = socket.kept  # the thread may not be done with the last one
    assert [one() for one in before] == [None] * (SENDS_AHEAD - 1)


@pytest.mark.parametrize(("numbers", "backend"), [(LENGTH - 1, "gloo"), (LENGTH, "nccl")])
def test_other_messages_are_launched_by_the_caller(numbers, backend, over):
    """A small message leaves sooner so, and NCCL launches a message behind the caller's stream."""
    socket = Socket()
    socket.may_write.set()
    over(socket, numbers, backend).send(1, message(0), torch.zeros(numbers))
    assert socket.threads == [get_ident()]


def test_a_large_message_that_is_lost_ends_the_step(over: Callable[..., Channels]) -> None:
    socket = Socket()
    socket.may_write.set()
    ends = over(socket)
    ends.send(1, message(0), torch.full((LENGTH,), -1.0))
    with pytest.raises(RuntimeError, match="the connection is lost"):
        ends.close()


def refuse_other_shape(rank: int, shape: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> str:
    ends = channels(shape, shapes)
    with pytest.raises(ValueError) as error:
        ends.send(1 - rank, message(0), torch.zeros(2, 3, 4))
    return str(error.value)


@pytest.mark.parametrize("known", [(SHAPE, ()), ((), [SHAPE])], ids=["of all", "of each"])
def test_another_shape_of_as_many_numbers_is_refused(known: tuple[Any, Any]) -> None:
    """Sequence and batch have changed places: the numbers would arrive, as noise."""
    for said in run_ranks(refuse_other_shape, 2, *known):
        assert "message of shape (2, 3, 4) where (3, 2, 4) was agreed" in said


class Network(Channels):
    """Channels over a network whose messages are over when the test says so."""

    def __init__(self, shape: tuple[int, ...] = SHAPE) -> None:
        self._shape, self._dtype, self._device = shape, torch.float, torch.device("cpu")
        self._shapes = ()
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

    def _send(self, peer: int, *tensors: torch.Tensor) -> None:
        work: Any = self._work(self.sent, fails=tensors[-1].sum() < 0)
        self._sending.append(_Sent([work], tensors))
        self.sent += 1

    def _receive(self, peer, shape, dtype):
        return torch.zeros(shape), self._work(-1)


def test_few_messages_are_on_their_way() -> None:
    """A rank that is ahead waits for its oldest message, and learns what became of it."""
    ends = Network()
    for number in range(SENDS_AHEAD + 3):
        ends.send(1, message(number), NUMBERS)
        assert ends.waited == list(range(number + 1 - SENDS_AHEAD))
    ends.close()
    assert ends.waited == list(range(SENDS_AHEAD + 3))
    ends.send(1, message(0), -NUMBERS)
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
    ends = DummyChannels([0], dist.group.WORLD, dist.group.WORLD, SHAPE, torch.float, torch.device("cpu"))
    got = []
    for number in range(3):
        ends.post(1, message(number))
        got.append(ends.receive(1, message(number)))
    places = {one.untyped_storage().data_ptr() for one in got}
    return len(places), all(bool(one.any() and one.isfinite().all()) for one in got)


def test_made_up_messages_take_the_memory_of_real_ones() -> None:
    """A rehearsal measures memory: what is received is a tensor of its own, as it would be in a real run."""
    assert run_ranks(made_up, 1) == [(3, True)]


def activation_and_gradient(rank: int) -> tuple[torch.Tensor, dict[int, set[tuple[int, ...]]]]:
    """Send an activation down and its gradient up; return what this rank got, and what was announced."""
    dist.init_process_group("gloo")
    announced: dict[int, set[tuple[int, ...]]] = {}
    groups = direction_groups([0, 1])
    ends = Channels([0, 1], *groups, (), torch.float, torch.device("cpu"), (), announced)
    down, up = Message(0, 1, 3), Message(1, 0, 3)
    if rank == 0:
        ends.send(1, down, NUMBERS)
        ends.post(1, up)
        got = ends.receive(1, up)
    else:
        ends.post(0, down)
        got = ends.receive(0, down)
        ends.send(0, up, 2 * got)
    ends.close()
    assert not ends._of_gradients, "what is known of a message goes with it, also where no step flushes"
    return got, announced


def test_a_gradient_announces_no_shape() -> None:
    (gradient, *known), (activation, *others) = run_ranks(activation_and_gradient, 2)
    assert torch.equal(activation, NUMBERS) and torch.equal(gradient, 2 * NUMBERS)
    assert known == others == [{3: {SHAPE}}]


def through_a_v(rank: int, shapes: Sequence[tuple[int, ...]]) -> tuple[list[torch.Tensor], int, str]:
    """Send activations of a microbatch down and back up, and their gradients the same way back.

    Return what this rank got, how many shapes it was told, and what ended it.
    """
    dist.init_process_group("gloo")
    announced: dict[int, set[tuple[int, ...]]] = {}
    about = torch.float, torch.device("cpu"), (), announced, True
    ends = Channels([0, 1], *direction_groups([0, 1]), (), *about)
    keep, kept, got = ends._keep, list[int](), list[torch.Tensor]()
    ends._keep = lambda *given: (kept.append(1), keep(*given))[-1]  # type: ignore[method-assign]
    route = [Message(0, 1, 3), Message(2, 3, 3), Message(3, 2, 3), Message(1, 0, 3)]
    repeats = [False, True, False, False]
    senders = [0, 1, 0, 1]
    try:
        for at, (one, sender) in enumerate(zip(route, senders, strict=True)):
            if sender == rank:
                ends.send(1 - rank, one, torch.full(shapes[at], float(at)), repeats[at])
            elif at == 1 and shapes[1] != shapes[0]:
                break
            else:
                ends.post(1 - rank, one, repeats[at])
                got.append(ends.receive(1 - rank, one))
    except OtherShape as error:
        return got, len(kept), str(error)
    if shapes[1] == shapes[0]:
        ends.close()
    return got, len(kept), ""


def test_a_microbatch_that_comes_back_to_a_rank_repeats_its_shape() -> None:
    (first, *about), (second, *others) = run_ranks(through_a_v, 2, [SHAPE] * 4)
    assert [tensor.unique().item() for tensor in first] == [1, 3]
    assert [tensor.unique().item() for tensor in second] == [0, 2]
    assert {tensor.shape for tensor in (*first, *second)} == {SHAPE}
    assert about == others == [1, ""]


def test_a_microbatch_that_comes_back_with_another_shape_is_an_error() -> None:
    _, (_, _, error) = run_ranks(through_a_v, 2, [SHAPE, (1, 2, 4), SHAPE, SHAPE])
    assert f"shape (1, 2, 4) where {SHAPE} was agreed" in error
