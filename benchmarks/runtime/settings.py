"""How a way of training chooses its settings: by the lowest loss, of all that are tried or downhill."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

RATES = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
BETAS = ("0.5", "0.8", "0.9", "0.95", "0.98", "0.99")


class Settings(NamedTuple):
    """What a way of training chooses for itself: the learning rate and Adam's beta1."""

    rate: str
    beta: str

    @property
    def at_the_edge(self) -> bool:
        """Whether a value beyond those of the search could be better still."""
        return self.rate in (RATES[0], RATES[-1]) or self.beta in (BETAS[0], BETAS[-1])


def search(first: Settings, loss: Callable[[Settings], float]) -> Settings:
    """Return the best settings downhill from ``first``: among the rates, then among the values of beta1."""
    rate = lowest(RATES, first.rate, lambda rate: loss(first._replace(rate=rate)))
    beta = lowest(BETAS, first.beta, lambda beta: loss(Settings(rate, beta)))
    return Settings(rate, beta)


def lowest(line: Sequence[str], start: str, loss: Callable[[str], float]) -> str:
    """Return a value on ``line`` whose neighbours have no lower loss, downhill from ``start``."""
    place = line.index(start)
    while True:
        near = (place, *(at for at in (place - 1, place + 1) if 0 <= at < len(line)))
        following = min(near, key=lambda at: loss(line[at]))
        if following == place:
            return line[place]
        place = following


def best(losses: dict[str, float]) -> str:
    """Return the rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def cells(losses: dict[str, float]) -> list[str]:
    """Return the losses for a table's row, the best in bold."""
    return [f"**{loss:.3f}**" if rate == best(losses) else f"{loss:.3f}" for rate, loss in losses.items()]
