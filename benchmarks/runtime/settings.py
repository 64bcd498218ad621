"""How a way of training chooses its settings: by the lowest loss, of all that are tried or downhill."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

RATES = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
MOMENTA = ("0", "0.2", "0.5", "0.8", "0.9", "0.95", "0.98", "0.99", "0.995")


class Settings(NamedTuple):
    """The settings that a way of training chooses: the learning rate, and Adam's beta1 or Muon's momentum."""

    rate: str
    momentum: str

    @property
    def at_the_edge(self) -> bool:
        """Whether a value beyond those of the search could be better still; a momentum has none below 0."""
        return self.rate in (RATES[0], RATES[-1]) or self.momentum == MOMENTA[-1]


def search(first: Settings, loss: Callable[[Settings], float]) -> Settings:
    """Return settings, downhill from ``first``, none of whose eight neighbours has a lower loss.

    A lower momentum goes with a higher rate, so that neither is searched alone.
    """
    place = RATES.index(first.rate), MOMENTA.index(first.momentum)
    while True:
        around = [
            (rate, momentum)
            for rate, momentum in product(*(range(at - 1, at + 2) for at in place))
            if 0 <= rate < len(RATES) and 0 <= momentum < len(MOMENTA)
        ]
        following = min([place, *around], key=lambda at: loss(Settings(RATES[at[0]], MOMENTA[at[1]])))
        if following == place:
            return Settings(RATES[place[0]], MOMENTA[place[1]])
        place = following


def best(losses: dict[str, float]) -> str:
    """Return the rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def cells(losses: dict[str, float]) -> list[str]:
    """Return the losses for a table's row, the best in bold."""
    return [f"**{loss:.3f}**" if rate == best(losses) else f"{loss:.3f}" for rate, loss in losses.items()]
