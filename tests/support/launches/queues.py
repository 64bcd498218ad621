"""A model of a GPU's launch queues, which finds whether all launches of a pipeline finish.

The host of a rank launches into a few queues, each of which is in order: its head starts once the launch
before it on the same stream and the events it waits for are done, and only then the next entry becomes the
head.  A message that has started and waits for the other side blocks its stream, but no other launch
behind it in the queue.  Nothing takes time here.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from tests.support.launches.entries import Collective, Copy, HostWait, Kernel, Launches, Transfer, Wait
from tests.support.launches.hardware import Launch, Place, Setting, place


def circle(pipeline: Sequence[Launches], setting: Setting) -> str:
    """Describe the circle in which the pipeline hangs; empty if it does not.

    ``pipeline[r]`` are the launches of rank r.  Kernels take no time here, and no event can prevent another,
    so the answer holds for kernels of any length.
    """
    return Queues(pipeline, setting).run()


class Queues:
    """All ranks with their hosts and queues."""

    def __init__(self, pipeline: Sequence[Launches], setting: Setting) -> None:
        self._ranks = place(pipeline, setting)
        self._host = [0] * len(self._ranks)
        self._unfinished = [0] * len(self._ranks)
        self._done = [bytearray(len(launches)) for launches in self._ranks]
        self._started = [bytearray(len(launches)) for launches in self._ranks]
        # The number of launches that have yet to start before a launch can end: itself and those it meets.
        self._missing = [[1 + len(launch.meets) for launch in launches] for launches in self._ranks]
        self._met_by: dict[Place, list[Place]] = {}
        for rank, launches in enumerate(self._ranks):
            for at, launch in enumerate(launches):
                for other in launch.meets:
                    if other is not None:
                        self._met_by.setdefault(other, []).append((rank, at))
        self._waiting = [_by_queue(launches) for launches in self._ranks]
        # The ranks on which a launch may have become possible.
        self._stirred = dict.fromkeys(range(len(self._ranks)))

    def run(self) -> str:
        """Let all launches start and end that can, and return the circle, as ``circle`` does."""
        self._settle()
        return "\n".join(self._circle())

    def _settle(self) -> None:
        while self._stirred:
            rank, _ = self._stirred.popitem()
            while self._advance_host(rank) or self._start_heads(rank):
                pass

    def _advance_host(self, rank: int) -> bool:
        launches, done, before = self._ranks[rank], self._done[rank], self._host[rank]
        at = before
        while at < len(launches):
            launch = launches[at]
            if launch.queue < 0:
                waits_for_all = not launch.after
                if self._unfinished[rank] if waits_for_all else not done[launch.after[0]]:
                    break
                done[at] = 1
            else:
                self._unfinished[rank] += 1
            at += 1
        self._host[rank] = at
        return at > before

    def _start_heads(self, rank: int) -> bool:
        launches, done, host = self._ranks[rank], self._done[rank], self._host[rank]
        any_started = False
        for queue in self._waiting[rank]:
            while queue and queue[0] < host:
                for other in launches[queue[0]].after:
                    if not done[other]:
                        break
                else:
                    any_started = True
                    self._start(rank, queue.popleft())
                    continue
                break
        return any_started

    def _start(self, rank: int, at: int) -> None:
        self._started[rank][at] = 1
        for member in ((rank, at), *self._met_by.get((rank, at), ())):
            missing = self._missing[member[0]]
            missing[member[1]] -= 1
            if not missing[member[1]]:
                self._finish(*member)

    def _finish(self, rank: int, at: int) -> None:
        self._done[rank][at] = 1
        self._unfinished[rank] -= 1
        self._stirred[rank] = None

    def _circle(self) -> Iterator[str]:
        stuck = next((r for r, launches in enumerate(self._ranks) if not all(self._done[r])), None)
        if stuck is None:
            return
        path: dict[Place, str] = {}
        place: Place | None = stuck, self._done[stuck].index(0)
        while place is not None and place not in path:
            reason, other = self._cause(*place)
            path[place] = f"{self._name(place)} {reason} {self._name(other)}"
            place = other
        first = 0 if place is None else list(path).index(place)
        yield from list(path.values())[first:]

    def _cause(self, rank: int, at: int) -> tuple[str, Place | None]:
        """Return the reason why a launch is unfinished, and the launch that it waits for."""
        launch, done = self._ranks[rank][at], self._done[rank]
        if at > self._host[rank]:
            return "is not launched before", (rank, self._host[rank])
        if self._started[rank][at]:
            return "waits for", next(
                other for other in launch.meets if other is None or not self._started[other[0]][other[1]]
            )
        for other in launch.after:
            if not done[other]:
                return "waits for", (rank, other)
        if launch.queue < 0:
            return "waits for", (rank, next(other for other in range(at) if not done[other]))
        head = next(queue[0] for queue in self._waiting[rank] if at in queue)
        return f"stands in queue {launch.queue} behind", (rank, head)

    def _name(self, at: Place | None) -> str:
        if at is None:
            return "what nobody launches"
        rank, number = at
        match self._ranks[rank][number].entry:
            case Kernel(name):
                text = f"kernel {name}"
            case Transfer(group, peer, is_send, name):
                text = f"{'send to' if is_send else 'receive from'} {peer} ({group}{name and ', ' + name})"
            case Collective(group, _, name):
                text = f"collective {name} ({group})"
            case Copy(way, name):
                text = f"copy {way} of {name}"
            case Wait():
                text = "compute stream's wait"
            case HostWait(on):
                text = "host's wait" if on is not None else "synchronization"
        return f"rank {rank}, launch {number}: {text}"


def _by_queue(launches: Sequence[Launch]) -> list[deque[int]]:
    queues: dict[int, deque[int]] = {}
    for at, launch in enumerate(launches):
        if launch.queue >= 0:
            queues.setdefault(launch.queue, deque()).append(at)
    return list(queues.values())
