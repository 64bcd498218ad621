"""Insert synchronizations of the whole device into launches, in places where a job may have them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.support.launches.entries import Copy, Entry, HostWait, Kernel, Launches, Wait


def never(launches: Launches) -> Launches:
    """Insert none."""
    return launches


def before_every_action(launches: Launches) -> Launches:
    """Synchronize where Megatron's timers do under ``--timing-log-level 2``."""
    return _synchronized(launches, lambda entry, before: entry.name != before)


def before_the_first_of_each_kind(launches: Launches) -> Launches:
    """Synchronize once for each kind of action of each stage, as lazily loaded modules and autotuning do."""
    kinds: set[str] = set()

    def is_new(entry: Kernel, before: str) -> bool:
        kind = entry.name.rstrip("0123456789")
        return kind not in kinds and not kinds.add(kind)  # type: ignore[func-returns-value]

    return _synchronized(launches, is_new)


def before_every_launch(launches: Launches) -> Launches:
    """Synchronize as the allocator may when memory is short; this includes all other places."""
    return _with_waits_at(
        launches, [at for at, entry in enumerate(launches) if not isinstance(entry, HostWait)]
    )


ALL = (never, before_every_action, before_the_first_of_each_kind, before_every_launch)


def _synchronized(launches: Launches, is_at: Callable[[Kernel, str], bool]) -> Launches:
    """Synchronize before each kernel that ``is_at`` accepts, given the name of the kernel before."""

    def places() -> Iterator[int]:
        before = ""
        for at, entry in enumerate(launches):
            if isinstance(entry, Kernel):
                if is_at(entry, before):
                    yield at
                before = entry.name

    return _with_waits_at(launches, list(places()))


def _with_waits_at(launches: Launches, places: list[int]) -> Launches:
    entries: list[Entry] = []
    moved_to: list[int] = []
    inserted = set(places)
    for at, entry in enumerate(launches):
        if at in inserted:
            entries.append(HostWait())
        moved_to.append(len(entries))
        if isinstance(entry, Wait | HostWait) and entry.on is not None:
            entry = replace(entry, on=moved_to[entry.on])
        elif isinstance(entry, Copy):
            entry = replace(entry, after=tuple(moved_to[on] for on in entry.after))
        entries.append(entry)
    return tuple(entries)
