"""Releases of Transformer Engine whose layers cannot leave a weight gradient for later."""

from argparse import Namespace

import pytest

from megatron_pp_ext.job.refusals import unsplit_engine

ARGS = Namespace(transformer_impl="transformer_engine")


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("1.13.0", True), ("2.2.1", True), ("2.3.0", False), ("2.3.0+f1a2b3", False), ("2.10.0", False)],
)
def test_releases_are_compared_as_numbers(version: str, is_refused: bool) -> None:
    assert unsplit_engine(version).is_set(ARGS) is is_refused
    assert not unsplit_engine(version).is_set(Namespace(transformer_impl="local"))
