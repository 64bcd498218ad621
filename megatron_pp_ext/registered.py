"""What features and other products add to a place that knows none of them."""

from collections.abc import Iterator


class Registered[T]:
    """All that was added, each once, in the order of the first addition."""

    def __init__(self) -> None:
        self._added: list[T] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self._added)

    def add(self, one: T) -> None:
        """Add ``one``, unless it was added before: a module may be imported anew."""
        if one not in self._added:
            self._added.append(one)
