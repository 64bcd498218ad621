"""The search of a benchmark for a learning rate and a momentum goes downhill and stops where it should."""

from benchmarks.runtime.settings import MOMENTA, RATES, Settings, search


def test_downhill_along_a_diagonal() -> None:
    """A lower momentum goes with a higher rate: alone, neither of the two has a lower loss."""
    asked: set[Settings] = set()

    def loss(settings: Settings) -> float:
        asked.add(settings)
        rate, momentum = RATES.index(settings.rate), MOMENTA.index(settings.momentum)
        return 3 * abs(rate + momentum - 6) + abs(rate - 4)

    assert search(Settings(RATES[2], MOMENTA[4]), loss) == Settings(RATES[4], MOMENTA[2])
    # Two steps, each to a corner, and the neighbours of where it stops.
    assert len(asked) == 9 + 5 + 5


def test_a_lower_value_beyond_a_hill_stays_unknown() -> None:
    losses = {settings: 1 for settings in (Settings(RATES[0], MOMENTA[0]), Settings(RATES[2], MOMENTA[0]))}
    start = Settings(RATES[2], MOMENTA[2])
    assert search(start, lambda settings: losses.get(settings, 2)) == start


def test_to_a_corner_of_the_grid() -> None:
    def loss(settings: Settings) -> float:
        return RATES.index(settings.rate) - MOMENTA.index(settings.momentum)

    assert search(Settings(RATES[3], MOMENTA[5]), loss) == Settings(RATES[0], MOMENTA[-1])


def test_a_choice_at_an_end_of_a_line_is_marked() -> None:
    assert Settings(RATES[0], MOMENTA[2]).at_the_edge
    assert Settings(RATES[2], MOMENTA[-1]).at_the_edge
    assert not Settings(RATES[1], MOMENTA[0]).at_the_edge  # there is no momentum below 0
    assert not Settings(RATES[1], MOMENTA[-2]).at_the_edge
