"""The launches of a rank's host, in host order, as recordings and the model of launch queues share them.

A rank's launches are a sequence of these entries; ``Wait.on`` and ``HostWait.on`` are positions in it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work on the compute stream.

    Kernels of one action carry its name, such as "3F0": stage 3, forward, microbatch 0.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or receive, launched after all work that the compute stream has by then.

    Transfers from one rank to another in one ``group`` are matched first in, first out.
    """

    group: str
    peer: int
    is_send: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a collective of ``ranks``, this one included, on the stream of ``group``.

    It is launched behind everything that the compute stream has by then, and ends once all ranks have
    started theirs.  The n-th that one rank launches meets the n-th of the others.  With ``is_waited_for``
    the compute stream waits for it at once; otherwise a Wait may follow later.
    """

    group: str
    ranks: tuple[int, ...]
    name: str = ""
    is_waited_for: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between the device and its host on the stream of its ``way``, "out" or "back".

    It is launched behind everything that the compute stream has by then, and behind the entries ``after``.
    """

    way: str
    name: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits for the entry at position ``on`` of this rank."""

    on: int


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host launches nothing more until the entry at ``on`` is done.

    None stands for all that this rank has launched so far: a synchronization of the whole device.
    """

    on: int | None = None


Entry = Kernel | Transfer | Collective | Copy | Wait | HostWait
Launches = tuple[Entry, ...]
"""The launches of one rank; a pipeline has one such tuple for each of its ranks."""
