"""Sequences in slices train as whole ones do, up to the order in which sums are taken."""

import pytest

from tests.support.comparison import assert_close, run, stock

PIPELINE = ("--pipeline-model-parallel-size", "2")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_slices(name: str) -> None:
    ours = run(2, [*PIPELINE, "--pipeline-schedule", name, "--pipeline-slice-tokens", "8"])
    assert_close(ours, stock(2, *PIPELINE))
