"""Random loops on megatron.core whose microbatches are of unlike length, with slices and without."""

from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support.ranks import RankError, run_ranks

# isort: split
import pytest
import torch

import megatron_pp_ext
from tests.support import own_loop, own_loop_lengths

_WHOLE = ("1f1b", "zb-h1", "zb-h2", "gpipe", "v-min", "v-half", "v-zb", "interleaved", "flex", "auto")
_CUT = ("1f1b", "zb-h1", "v-half", "v-zb", "interleaved", "flex")
_TWO_CHUNKS = ("v-min", "v-half", "v-zb", "interleaved", "auto")


@dataclass(frozen=True, slots=True)
class Job:
    """A loop: what ``install`` is told, the microbatches of each step, and the lengths that data goes round.

    Each of ``documents`` has the lengths of a microbatch; those of packs are several.
    """

    ranks: int
    schedule: str
    about: tuple[tuple[str, Any], ...]
    counts: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    is_packed: bool


def drawn(seed: int, number: int) -> Job:
    """Return case ``number`` of ``seed``: half of all have slices."""
    random = Random(f"{seed} {number}")
    is_cut, is_packed = number % 2 == 1, random.random() < 0.4
    schedule = random.choice(_CUT if is_cut else _WHOLE)
    order = random.choice(["rule", "search"] if is_cut else ["rule", "search", "none"])
    about: dict[str, Any] = {} if order == "none" else {"order": order}
    if is_cut:
        about["slice_tokens"] = random.choice([3, 6, 11])
    if schedule == "flex":
        about["memory_limit"] = random.choice([0.75, 0.9, 1.0])
    documents = tuple(
        tuple(random.randint(1, 12) for _ in range(random.randint(1, 4)))
        if is_packed
        else (random.randint(1, 32),)
        for _ in range(random.randint(3, 9))
    )
    counts = tuple(random.randint(1, 9) for _ in range(3))
    ranks = random.choice([2, 2, 4])
    return Job(ranks, schedule, tuple(about.items()), counts, documents, is_packed)


def problem(job: Job) -> str:
    """Return in which way the loop differs from one under Megatron's own schedule; empty for in none."""
    try:
        found = run_ranks(_both, job.ranks, job, timeout=240)
    except RankError as error:
        return str(error)
    ours, stock = ([rank[place] for rank in found] for place in (0, 1))
    try:
        for mine, theirs in zip(ours[-1].losses, stock[-1].losses, strict=True):
            # In the order of the data, whatever order they ran in.
            assert mine == pytest.approx(theirs, rel=1e-4)
        for what in ("gradients", "weights"):
            merged, others = (own_loop._whole(records, what) for records in (ours, stock))
            assert merged.keys() == others.keys()
            for name, value in merged.items():
                torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return ""


def _both(rank: int, job: Job) -> tuple[own_loop.Record, own_loop.Record]:
    own_loop.start(job.ranks)
    stock = _trained(job, 1)
    chunks = 2 if job.schedule in _TWO_CHUNKS else 1
    microbatches = max(job.counts)
    with megatron_pp_ext.installed(
        job.schedule, ranks=job.ranks, microbatches=microbatches, **dict(job.about)
    ) as line:
        return _trained(job, line.chunks if job.schedule == "flex" else chunks), stock


def _trained(job: Job, chunks: int) -> own_loop.Record:
    varies = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    if not job.is_packed:
        model = own_loop.build(chunks, **varies)
        return own_loop.train(model, job.counts, tuple(map(sum, job.documents)), seq_length=1)
    own_loop_lengths.PACKS = job.documents
    own_loop.batches = own_loop_lengths.packed_batches
    try:
        model = own_loop.build(chunks, model_class=own_loop_lengths.packed_gpt, **varies)
        step = own_loop_lengths.packed_step
        return own_loop.train(model, job.counts, seq_length=1, forward_step_func=step)
    finally:
        own_loop.batches = own_loop_lengths.BATCHES
