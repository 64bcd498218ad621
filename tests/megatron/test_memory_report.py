"""Megatron's report of theoretical memory under a schedule, beside a report of round numbers."""

from argparse import Namespace
from collections.abc import Iterator

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.trainer import reports
from megatron_pp_ext.schedule.costs import CostModel, Costs

ARGS = Namespace(
    pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, padded_vocab_size=100
)


@pytest.fixture(autouse=True)
def stock_again() -> Iterator[None]:
    yield
    requested.activate(None)


def activations(args: Namespace, microbatches: int | None, verbose: bool = False) -> float:
    """1F1B's: a hundred bytes for each rank, of a model that is not cut into chunks."""
    assert args.virtual_pipeline_model_parallel_size is None and microbatches is None
    return 400.0


def weights(args: Namespace, verbose: bool = False) -> float:
    return 10.0 * args.padded_vocab_size


def activate(name: str) -> None:
    request = named(name, 4, 8)
    requested.activate(requested.Pipeline(request, Source(request, CostModel(Costs.unit))))


def test_activations_are_those_in_flight() -> None:
    """Under V-Half three microbatches on the fullest of four ranks, where 1F1B has four."""
    for name, expected in (("v-half", 300.0), ("1f1b", 400.0), ("gpipe", 800.0)):
        activate(name)
        assert reports.activations_as_scheduled(activations)(ARGS, 8) == expected
    assert ARGS.virtual_pipeline_model_parallel_size == 2


def test_a_v_has_the_output_layer_beside_the_embedding() -> None:
    for name, expected in (("v-half", 2000.0), ("1f1b", 1000.0)):
        activate(name)
        assert reports.weights_of_embedding_and_head(weights)(ARGS) == expected
    assert ARGS.padded_vocab_size == 100
