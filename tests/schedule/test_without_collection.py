"""The collector is off inside, and afterwards as it was."""

import gc

import pytest

from megatron_pp_ext.schedule.loops import without_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_before_even_after_an_error(was_on: bool) -> None:
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ValueError, match="no plan"), without_collection():
            assert not gc.isenabled()
            raise ValueError("no plan")
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
