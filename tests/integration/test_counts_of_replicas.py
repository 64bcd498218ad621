"""Data-parallel replicas with numbers of microbatches of their own, as dynamic batches give them."""

from contextlib import nullcontext

from megatron.core import parallel_state

import megatron_pp_ext
from tests.support import own_loop
from tests.support.ranks import run_ranks

STEPS = (4, 4), (4, 2), (2, 4), (5, 4), (3, 2)
"""The microbatches of both replicas.  With 2, v-zb completes the chunks of rank 1 in another order."""

OURS = ("v-zb", 2, True), ("v-zb", 2, False), ("zb-h1", 1, False)
"""Schedules, their chunks, and whether a chunk is reduced as a whole (Megatron's align_grad_reduce)."""


def trained(name: str | None, chunks: int, is_aligned: bool) -> own_loop.Record:
    """Train this rank of one of two pipelines of two ranks, which reduce gradients during the step."""
    replica = parallel_state.get_data_parallel_rank()
    with megatron_pp_ext.installed(name, ranks=2, microbatches=4) if name else nullcontext():
        model = own_loop.build(chunks, overlaps=True)
    config, several = model[0].config, chunks > 1
    for setting, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
        functions = [getattr(chunk, method) for chunk in model]
        setattr(config, setting, functions if several else functions[0])
    if not is_aligned:
        config.grad_sync_func = None
    return own_loop.train(model, tuple(counts[replica] for counts in STEPS), seed=7 + replica)


def on_rank(rank: int) -> list[own_loop.Record]:
    """Return what ``rank`` found under stock's schedule and under ours."""
    own_loop.start()
    return [trained(*job) for job in ((None, 1, True), *OURS)]


def test_replicas_with_other_numbers_train_as_under_stock() -> None:
    stock, *others = zip(*run_ranks(on_rank, 4), strict=True)
    for ours in others:
        for pipeline in (0, 1):
            own_loop.assert_same(ours[pipeline::2], stock[pipeline::2])
