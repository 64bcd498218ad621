"""Assign every launch of every rank to a queue, with the launches it waits for, in one hardware setting."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tests.support.launches.entries import Collective, Copy, Entry, HostWait, Kernel, Launches, Transfer, Wait

Place = tuple[int, int]
"""A rank and the number of a launch on it."""

_COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Setting:
    """The properties of the hardware that a job cannot rely on.

    ``queues`` is CUDA_DEVICE_MAX_CONNECTIONS.  With ``sends_wait`` a send ends together with its receive;
    otherwise it leaves at once.  With ``stream_a_pair`` any two ranks have a stream in each group, as under
    torch's old backend and "nccl-lazy"; otherwise a group has one stream, as under "nccl2".

    A rank's streams are assigned to its queues in turn, in the order of their first use.  With
    ``foreign_streams`` the compute stream comes first, then that many streams of others, then those of
    messages.
    """

    queues: int = 1
    sends_wait: bool = True
    stream_a_pair: bool = True
    foreign_streams: int | None = None


@dataclass(slots=True)
class Launch:
    """An entry on its way through the hardware; ``queue`` is -1 for a wait of the host.

    ``after`` are the launches of this rank that must be done before it starts: the one before on its
    stream and the events it waits for.  ``meets`` are the launches that must have started before it ends;
    None stands for one that no rank launches.
    """

    entry: Entry
    queue: int
    after: tuple[int, ...]
    meets: list[Place | None]


def place(pipeline: Sequence[Launches], setting: Setting) -> list[list[Launch]]:
    """Return the launches of all ranks, in host order.

    A collective that is waited for at once becomes two: itself and the wait.  A synchronization of the
    device has no ``after``: the model counts what is unfinished.
    """
    ranks, ends = [], _Ends(setting)
    for rank, launches in enumerate(pipeline):
        ranks.append(_place_rank(rank, launches, setting, ends))
    ends.join(ranks)
    return ranks


def _place_rank(rank: int, launches: Launches, setting: Setting, ends: "_Ends") -> list[Launch]:
    placed: list[Launch] = []
    numbers: list[int] = []
    last: dict[Hashable, int] = {}
    before = setting.foreign_streams
    queues: dict[Hashable, int] = {} if before is None else {_COMPUTE: 0}

    def launch(entry: Entry, stream: Hashable, *events: int) -> None:
        if stream not in queues:
            queues[stream] = (len(queues) + (before or 0)) % setting.queues
        after = {event for event in (last.get(stream), *events) if event is not None}
        last[stream] = len(placed)
        placed.append(Launch(entry, queues[stream], tuple(after), []))

    def behind_compute(entry: Entry, stream: Hashable, *events: int) -> None:
        launch(entry, stream, *events, *([last[_COMPUTE]] if _COMPUTE in last else []))

    for entry in launches:
        numbers.append(len(placed))
        match entry:
            case Kernel():
                launch(entry, _COMPUTE)
            case Wait(on):
                launch(entry, _COMPUTE, numbers[on])
            case HostWait(on):
                placed.append(Launch(entry, -1, () if on is None else (numbers[on],), []))
            case Copy(way, _, after):
                behind_compute(entry, way, *(numbers[on] for on in after))
            case Transfer():
                ends.add(rank, len(placed), entry)
                stream = frozenset((rank, entry.peer)) if setting.stream_a_pair else None
                behind_compute(entry, (entry.group, stream))
            case Collective():
                ends.add_collective(rank, len(placed), entry)
                behind_compute(entry, (entry.group, None))
                if entry.is_waited_for:
                    launch(Wait(numbers[-1]), _COMPUTE, numbers[-1])
    return placed


class _Ends:
    """The two ends of every transfer, and all ends of every collective."""

    def __init__(self, setting: Setting) -> None:
        self._sends_wait = setting.sends_wait
        self._sends: defaultdict[Hashable, list[Place]] = defaultdict(list)
        self._receives: defaultdict[Hashable, list[Place]] = defaultdict(list)
        self._collectives: defaultdict[tuple[str, tuple[int, ...], int], dict[int, Place]] = defaultdict(dict)
        self._numbers: Counter[Hashable] = Counter()

    def add(self, rank: int, number: int, transfer: Transfer) -> None:
        if transfer.is_send:
            self._sends[transfer.group, rank, transfer.peer].append((rank, number))
        else:
            self._receives[transfer.group, transfer.peer, rank].append((rank, number))

    def add_collective(self, rank: int, number: int, collective: Collective) -> None:
        communicator = collective.group, tuple(sorted(collective.ranks))
        self._collectives[*communicator, self._numbers[communicator, rank]][rank] = rank, number
        self._numbers[communicator, rank] += 1

    def join(self, ranks: list[list[Launch]]) -> None:
        """Set for every launch which others it meets."""
        for channel in self._sends.keys() | self._receives.keys():
            sends, receives = self._sends[channel], self._receives[channel]
            for number, (rank, at) in enumerate(receives):
                ranks[rank][at].meets.append(sends[number] if number < len(sends) else None)
            for number, (rank, at) in enumerate(sends if self._sends_wait else []):
                ranks[rank][at].meets.append(receives[number] if number < len(receives) else None)
        for (_, members, _), parts in self._collectives.items():
            for rank, at in parts.values():
                ranks[rank][at].meets.extend(parts.get(member) for member in members if member != rank)
