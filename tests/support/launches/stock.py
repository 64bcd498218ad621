"""The launches of Megatron's own schedules, which train on GPUs every day, so the model must let them finish.

They follow megatron-core 0.19.2, pipeline_parallel/schedules.py and p2p_communication.py.
"""

from tests.support.launches.entries import Batch, Entry, HostWait, Kernel, Launches, Transfer, Wait


def one_f_one_b(ranks: int, microbatches: int, synchronized: bool) -> tuple[Launches, ...]:
    """Return 1F1B with batched messages, which start together and are waited for at once.

    With ``synchronized`` the device is synchronized behind every batch (``batch_p2p_sync``).
    """
    return tuple(_one_f_one_b(rank, ranks, microbatches, synchronized) for rank in range(ranks))


def _one_f_one_b(rank: int, ranks: int, microbatches: int, synchronized: bool) -> Launches:
    found: list[Entry] = []
    down, up = rank + 1, rank - 1

    def compute(kind: str, microbatch: int) -> None:
        found.append(Kernel(f"{rank}{kind}{microbatch}"))

    def exchange(peer: int, *, send: bool = False, receive: bool = False) -> None:
        transfers = [Transfer("pipeline", peer, True)] * send + [Transfer("pipeline", peer, False)] * receive
        if not transfers or not 0 <= peer < ranks:
            return
        found.append(Batch(tuple(transfers)))
        found.append(Wait(len(found) - 1))
        if synchronized:
            found.append(HostWait())

    warm_up = min(ranks - rank - 1, microbatches)
    for microbatch in range(warm_up):
        exchange(up, receive=True)
        compute("F", microbatch)
        exchange(down, send=True)
    in_turn = range(microbatches - warm_up)
    exchange(up, receive=len(in_turn) > 0)
    for microbatch in in_turn:
        compute("F", warm_up + microbatch)
        exchange(down, send=True, receive=True)
        compute("B", microbatch)
        exchange(up, send=True, receive=microbatch != in_turn[-1])
    for microbatch in range(len(in_turn), microbatches):
        exchange(down, receive=True)
        compute("B", microbatch)
        exchange(up, send=True)
    return tuple(found)


def interleaved(ranks: int, microbatches: int, chunks: int) -> tuple[Launches, ...]:
    """Return interleaved 1F1B with ``overlap_p2p_comm``: the next receive is posted right behind an action.

    ``microbatches`` must be a multiple of ``ranks``.
    """
    return tuple(_Interleaved(rank, ranks, microbatches, chunks).launches() for rank in range(ranks))


class _Interleaved:
    """The launches of one rank; forwards and backwards are numbered in their order over all chunks."""

    def __init__(self, rank: int, ranks: int, microbatches: int, chunks: int) -> None:
        self._rank, self._ranks, self._chunks = rank, ranks, chunks
        self._table = [
            (first + offset, chunk)
            for first in range(0, microbatches, ranks)
            for chunk in range(chunks)
            for offset in range(ranks)
        ]
        self._found: list[Entry] = []
        self._awaited: dict[str, list[int]] = {"F": [], "B": []}

    def launches(self) -> Launches:
        total = len(self._table)
        warm_up = min(2 * (self._ranks - self._rank - 1) + (self._chunks - 1) * self._ranks, total)
        if self._rank > 0:
            self._wait(self._exchange("F", send=False, receive=True))
        for number in range(warm_up):
            self._compute("F", number)
            receive = number < total - 1 and self._receives_behind("F", number)
            self._wait(self._exchange("F", send=self._sends("F", number), receive=receive))
        if warm_up < total:
            self._awaited["B"] += self._exchange("B", send=False, receive=self._rank < self._ranks - 1)
        for number in range(total - warm_up):
            is_last = number == total - warm_up - 1
            self._step("F", warm_up + number, receives=not is_last)
            self._step("B", number)
        if warm_up == total and self._rank < self._ranks - 1:
            self._wait(self._exchange("B", send=False, receive=True))
        for number in range(total - warm_up, total):
            self._wait_for_input("B")
            self._compute("B", number)
            receive = number < total - 1 and self._receives_behind("B", number)
            self._wait(self._exchange("B", send=self._sends("B", number), receive=receive))
        return tuple(self._found)

    def _step(self, kind: str, number: int, receives: bool = True) -> None:
        """Do an action and wait for its send: outputs are freed early (``deallocate_pipeline_outputs``)."""
        self._wait_for_input(kind)
        self._compute(kind, number)
        receive = receives and self._receives_behind(kind, number)
        messages = self._exchange(kind, send=self._sends(kind, number), receive=receive)
        sends = [at for at in messages if self._is_send(at)]
        self._wait(sends)
        self._awaited[kind] += [at for at in messages if at not in sends]

    def _wait_for_input(self, kind: str) -> None:
        if self._awaited[kind]:
            self._wait([self._awaited[kind].pop(0)])

    def _chunk(self, kind: str, number: int) -> int:
        chunk = self._table[number][1]
        return chunk if kind == "F" else self._chunks - 1 - chunk

    def _compute(self, kind: str, number: int) -> None:
        stage = self._chunk(kind, number) * self._ranks + self._rank
        self._found.append(Kernel(f"{stage}{kind}{self._table[number][0]}"))

    def _sends(self, kind: str, number: int) -> bool:
        stage = self._chunk(kind, number) * self._ranks + self._rank
        return stage != (self._ranks * self._chunks - 1 if kind == "F" else 0)

    def _receives_behind(self, kind: str, number: int) -> bool:
        """Whether a message for the next action of this kind is expected behind this one.

        The rank where a chunk's leg begins receives the message to the next chunk from the other end of the
        pipeline, which is p - 1 actions behind it.
        """
        if self._rank != (0 if kind == "F" else self._ranks - 1):
            return True
        behind = number - (self._ranks - 1)
        return behind >= 0 and self._chunk(kind, behind) != (self._chunks - 1 if kind == "F" else 0)

    def _exchange(self, kind: str, *, send: bool, receive: bool) -> list[int]:
        """Send first on even ranks and receive first on odd ones; with two ranks each way has a group."""
        onward = 1 if kind == "F" else -1
        to, source = (self._rank + onward) % self._ranks, (self._rank - onward) % self._ranks
        is_even = self._rank % 2 == 0
        first = len(self._found)
        for is_send in (True, False) if is_even else (False, True):
            if send if is_send else receive:
                group = "world" if self._ranks == 2 and is_send != is_even else "pipeline"
                self._found.append(Transfer(group, to if is_send else source, is_send))
        return list(range(first, len(self._found)))

    def _is_send(self, at: int) -> bool:
        entry = self._found[at]
        return isinstance(entry, Transfer) and entry.is_send

    def _wait(self, messages: list[int]) -> None:
        self._found.extend(map(Wait, messages))
