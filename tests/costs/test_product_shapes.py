"""How much of its rate a product reaches: tiles, waves, and the ends of a tile's loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pp_ext.costs.system import efficiency

sizes = st.integers(1, 20000)


@given(sizes, sizes, sizes, st.integers(1, 400))
def test_it_is_a_share(m: int, n: int, k: int, processors: int) -> None:
    assert 0 < efficiency(m, n, k, processors) <= 1


@given(sizes, sizes, sizes, st.integers(1, 400))
def test_longer_loops_and_doubled_results_lose_no_efficiency(m: int, n: int, k: int, processors: int) -> None:
    one = efficiency(m, n, k, processors)
    assert efficiency(m, n, 2 * k, processors) >= one
    assert efficiency(2 * m, n, k, processors) >= one * (1 - 1e-12)


def test_shapes_make_no_difference_where_the_processors_are_not_known() -> None:
    assert efficiency(1, 1, 1, 0) == 1


def test_whole_waves_of_whole_tiles_lose_only_the_ends_of_loops() -> None:
    """10 x 10 tiles of 256 x 128 on 100 processors, whose loops have 1,280 steps and 128 around them."""
    assert efficiency(2560, 1280, 1280, 100) == pytest.approx(1280 / 1408)


def test_one_tile_more_than_processors_starts_a_second_wave() -> None:
    """Half of what it leaves idle is lost, unless smaller tiles, each slower by its reuse, lose less."""
    whole, more = efficiency(256 * 100, 128, 65536, 100), efficiency(256 * 101, 128, 65536, 100)
    assert 1.01 / 1.505 * whole <= more < 0.9 * whole


def test_products_of_a_group_are_one_product_of_more_tiles() -> None:
    assert efficiency(256, 128, 1024, 100, groups=50) == pytest.approx(efficiency(256 * 50, 128, 1024, 100))
