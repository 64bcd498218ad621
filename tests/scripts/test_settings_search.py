"""The search of a benchmark for a learning rate and beta1 goes downhill and stops where it should."""

from collections.abc import Callable

import pytest

from benchmarks.runtime.settings import BETAS, RATES, Settings, lowest, search


def counted(losses: dict[str, float], asked: list[str]) -> Callable[[str], float]:
    """Return the losses of a line, which notes what was ``asked``."""

    def loss(value: str) -> float:
        asked.append(value)
        return losses[value]

    return loss


@pytest.mark.parametrize(
    ("losses", "found", "never_asked"),
    [
        ((5, 4, 3, 2, 1, 2), 4, {0}),  # two steps along the line
        ((1, 2, 3, 4, 5, 6), 0, {4, 5}),  # to the end of the line
        ((0, 5, 2, 4, 1, 0), 2, {0, 4, 5}),  # a lower value beyond a hill stays unknown
        ((3, 2, 2, 2, 1, 0), 2, {0, 4, 5}),  # on level ground it stays
    ],
)
def test_downhill_from_the_third_value(losses, found, never_asked) -> None:
    asked: list[str] = []
    line = "abcdef"
    assert lowest(line, "c", counted(dict(zip(line, losses, strict=True)), asked)) == line[found]
    assert set(line) - set(asked) == {line[place] for place in never_asked}


def test_beta_is_searched_at_the_best_rate() -> None:
    def loss(settings: Settings) -> float:
        rate, beta = RATES.index(settings.rate), BETAS.index(settings.beta)
        return 2 * abs(rate - 3) + abs(beta - rate)

    assert search(Settings("1e-3", "0.9"), loss) == Settings(RATES[3], BETAS[3])


def test_a_choice_at_an_end_of_a_line_is_marked() -> None:
    assert Settings(RATES[0], BETAS[2]).at_the_edge
    assert Settings(RATES[2], BETAS[-1]).at_the_edge
    assert not Settings(RATES[1], BETAS[-2]).at_the_edge
