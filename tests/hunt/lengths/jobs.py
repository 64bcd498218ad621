"""Random loops on megatron.core whose microbatches are of unlike length, with slices and without.

Some can observe the order of their microbatches (``tests.support.observing_loops``).
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support.ranks import RankError, run_ranks

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_pp_ext
from tests.support import observing_loops, own_loop, own_loop_lengths, rounding

_WHOLE = ("1f1b", "zb-h1", "zb-h2", "gpipe", "v-min", "v-half", "v-zb", "interleaved", "flex", "auto")
_CUT = ("1f1b", "zb-h1", "v-half", "v-zb", "interleaved", "flex")
_TWO_CHUNKS = ("v-min", "v-half", "v-zb", "interleaved", "auto")
_PLAIN, _COMMUNICATES = "plain", "communicates in its loss"
_ORDERED = [name for name, loop in observing_loops.LOOPS.items() if loop.refused != ""]
"""The loops that may ask for an order, and those that are refused: what no one can see is not drawn."""


@dataclass(frozen=True, slots=True)
class Job:
    """A loop: what ``install`` is told, the microbatches of each step, and the lengths that data goes round.

    Each of ``documents`` has the lengths of a microbatch; those of packs are several.  Each of the
    ``replicas`` begins at another of them.
    """

    ranks: int
    schedule: str
    about: tuple[tuple[str, Any], ...]
    counts: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    is_packed: bool
    loop: str = _PLAIN
    replicas: int = 1

    @property
    def is_ordered(self) -> bool:
        return "order" in dict(self.about)

    @property
    def refused(self) -> str | None:
        """Words of the line in which the loop has to end; None where it trains."""
        return observing_loops.LOOPS[self.loop].refused if self.is_ordered else None


def drawn(seed: int, number: int) -> Job:
    """Return case ``number`` of ``seed``: half of all have slices."""
    random = Random(f"{seed} {number}")
    is_cut, is_packed = number % 2 == 1, random.random() < 0.4
    schedule = random.choice(_CUT if is_cut else _WHOLE)
    order = random.choice(["rule", "search"] if is_cut else ["rule", "search", "none", "none"])
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
    loop, replicas = _PLAIN, 1
    if not is_cut:
        loop = random.choice(list(observing_loops.LOOPS) if order == "none" else _ORDERED)
    if loop == _COMMUNICATES:
        ranks, replicas = 2, 2
    return Job(ranks, schedule, tuple(about.items()), counts, documents, is_packed, loop, replicas)


def problem(job: Job) -> str:
    """Return in which way the loop differs from one under Megatron's own schedule; empty for in none.

    Without an order that is any bit.  With one, weights stay as they are, so that gradients of all steps are
    those of the same numbers: Adam would make of a rounding a whole step, where a gradient is close to none.
    """
    try:
        found = run_ranks(_both, job.ranks * job.replicas, job, timeout=240)
    except RankError as error:
        is_right = job.refused is not None and re.search(job.refused, str(error))
        return "" if is_right else str(error)
    # A step of one microbatch has nothing to reuse.
    if job.refused is not None and max(job.counts) > 1:
        return f"it trains, and has to end with {job.refused!r}"
    try:
        for replica in range(job.replicas):
            pairs = found[replica :: job.replicas]
            ours, stock = ([pair[place] for pair in pairs] for place in (0, 1))
            if job.is_ordered:
                _assert_close(ours, stock)
            else:
                own_loop.assert_same(ours, stock)
    except AssertionError as error:
        return str(error) or "bits differ"
    return ""


def _assert_close(ours: list[own_loop.Record], stock: list[own_loop.Record]) -> None:
    for mine, theirs in zip(ours[-1].losses, stock[-1].losses, strict=True):
        # In the order of the data, whatever order they ran in.
        torch.testing.assert_close(
            torch.tensor(mine), torch.tensor(theirs), rtol=rounding.relative(), atol=0.0
        )
    for step in range(len(stock[0].steps)):
        merged, others = (
            {name: value for record in records for name, value in record.steps[step].items()}
            for records in (ours, stock)
        )
        assert merged.keys() == others.keys()
        for name, value in merged.items():
            rounding.assert_gradients_close(value, others[name], name=f"step {step}, {name}")


def _both(rank: int, job: Job) -> tuple[own_loop.Record, own_loop.Record]:
    if job.replicas == 1:
        own_loop.start(job.ranks)
    else:
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(1, job.ranks)
        model_parallel_cuda_manual_seed(1)
    stock = _trained(job, 1)
    chunks = 2 if job.schedule in _TWO_CHUNKS else 1
    microbatches = max(job.counts)
    with megatron_pp_ext.installed(
        job.schedule, ranks=job.ranks, microbatches=microbatches, **dict(job.about)
    ) as line:
        return _trained(job, line.chunks if job.schedule == "flex" else chunks), stock


def _trained(job: Job, chunks: int) -> own_loop.Record:
    replica = parallel_state.get_data_parallel_rank()
    documents = (*job.documents[replica:], *job.documents[:replica])
    about: dict[str, Any] = {"rate": 0.0 if job.is_ordered else own_loop.RATE, "seed": 7 + replica}
    varies: dict[str, Any] = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    if job.is_packed:
        own_loop_lengths.PACKS = documents
        own_loop.batches = own_loop_lengths.packed_batches
        varies["model_class"] = own_loop_lengths.packed_gpt
        about["forward_step_func"] = own_loop_lengths.packed_step
    try:
        model = own_loop.build(chunks, **varies)
        return observing_loops.trained(job.loop, model, job.counts, tuple(map(sum, documents)), **about)
    finally:
        own_loop.batches = own_loop_lengths.BATCHES
