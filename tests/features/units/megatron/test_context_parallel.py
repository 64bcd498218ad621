"""Slices that context-parallel ranks share train as whole sequences without context parallelism.

Both runs divide by the tokens of the whole step (--calculate-per-token-loss).  Without that flag each rank
divides by its own tokens, in stock too, and the mean of the ranks' means depends on who has which token.
"""

import pytest

from tests.features.units.megatron.test_parity import FULL, LLAMA, PP2, TP2, sliced
from tests.support import rounding
from tests.support.comparison import distance, run, stock
from tests.support.tiers import wide

PER_TOKEN = "--calculate-per-token-loss"
ONE_KEY = tuple(
    "1" if before == "--num-query-groups" else flag for before, flag in zip(("", *LLAMA), LLAMA, strict=False)
)

CASES = {
    "V-Half, grouped queries": (2, "v-half", 8, (*PP2, *LLAMA)),
    "1F1B, learned positions": (2, "1f1b", 8, PP2),
    "flex": (2, "flex --pipeline-memory-limit 0.7", 8, (*PP2, *LLAMA)),
    "repeated keys": (2, "zb-h1", 8, (*PP2, *ONE_KEY)),
    "four ranks, repeated keys": (4, "zb-h1", 8, (*PP2, *LLAMA)),
    "tensor-parallel": (2, "1f1b", 8, (*PP2, *LLAMA, *TP2)),
    "full recomputation": (2, "v-half", 8, (*PP2, *LLAMA, *FULL)),
    "selective recomputation": (2, "v-half", 8, (*PP2, *LLAMA, "--recompute-granularity", "selective")),
    "planned in each step": (2, "v-half --pipeline-order rule", 12, (*PP2, *LLAMA)),
    "planned, two samples": (2, "zb-h1 --pipeline-order search", 8, (*PP2, "--micro-batch-size", "2")),
}
ALWAYS = {"V-Half, grouped queries"}
"""What is not wide."""


@pytest.mark.parametrize("case", [case if case in ALWAYS else wide(case) for case in CASES])
def test_trains_as_whole_sequences_without_it(case: str) -> None:
    ranks, schedule, tokens, flags = CASES[case]
    pipeline = 4 if "--tensor-model-parallel-size" in flags else 2
    whole = stock(pipeline, *flags, PER_TOKEN)
    shared = ("--context-parallel-size", str(ranks))
    ours = run(pipeline * ranks, [*flags, *shared, PER_TOKEN, *sliced(schedule, tokens)])
    assert distance(ours, whole) < 1e-6
    assert ours.losses == pytest.approx(whole.losses, rel=rounding.of_losses(1))
