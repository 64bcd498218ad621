"""The order in which features come to what others have made."""

from collections.abc import Iterator

import pytest

from megatron_pp_ext import features
from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import Feature
from megatron_pp_ext.megatron.requested import Pipeline
from tests.support import ranks  # noqa: F401  (the stubs for torch.cuda, before Megatron is imported)

REQUEST = named("1f1b", 2, 4)


class Noting(Feature):
    """Notes when it is asked."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def order(self, request, costs, before):
        made = before(request)
        self.notes.append(f"order {self.name}")
        return made

    def completed(self, request, made):
        self.notes.append(f"completed {self.name}")
        return made

    def data_parts(self, pipeline):
        yield f"data {self.name}"

    def step_parts(self, pipeline):
        yield f"step {self.name}"


@pytest.fixture(name="notes")
def two_features() -> Iterator[list[str]]:
    """The notes of two features, a and b, that stand alone."""
    all_features, notes = list(FEATURES), []
    FEATURES.clear()
    try:
        for name in "ab":
            features.add(Noting(name, notes))
        yield notes
    finally:
        FEATURES[:] = all_features


def test_passes_come_in_order_and_then_what_completes(notes: list[str]) -> None:
    make(REQUEST)
    assert notes == ["order a", "order b", "completed a", "completed b"]


@pytest.mark.usefixtures("notes")
def test_data_are_read_ahead_before_any_feature_looks_at_them() -> None:
    from megatron_pp_ext.megatron.runners.flushed import step_parts

    assert step_parts(Pipeline(REQUEST)) == ["data a", "data b", "step a", "step b"]


@pytest.mark.usefixtures("notes")
def test_a_name_belongs_to_one_feature() -> None:
    with pytest.raises(ValueError, match="there is a feature 'a' already"):
        features.add(Noting("a", []))
