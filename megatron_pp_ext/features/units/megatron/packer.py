"""Megatron's own packing (``config.sequence_packing_scheduler``, ``dp_balanced``), by cost instead of tokens.

It packs the documents of a step in the order in which they come, up to a number of tokens.  ``pack_by_cost``
puts a scheduler in its place that balances what microbatches cost, and chooses how many there are.
"""

from dataclasses import replace
from typing import Any

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.packing import Groups, Packing
from megatron_pp_ext.features.units.rates import EQUAL_AT, OVERHEAD

_NAME = "dp_balanced"


def pack_by_cost(
    schedule: str = "1f1b",
    *,
    ranks: int,
    chunks: int | None = None,
    most_tokens: int | None = None,
    equal_at: float = EQUAL_AT,
    overhead: float = OVERHEAD,
) -> None:
    """Let ``dp_balanced`` of this process balance microbatches by their costs; again, by other ones.

    ``schedule`` with so many pipeline ``ranks`` and ``chunks`` a rank is the one by which steps are timed:
    those with two thirds to three times as many microbatches as Megatron has, and Megatron's own, which stays
    where no other is shorter.  A microbatch costs ``overhead`` tokens on top of its own.  It has at most
    ``most_tokens`` tokens, by default as many as Megatron allows (``max_seqlen_per_dp_cp_rank``, of all
    context-parallel ranks); give more where memory allows.

    Call it on every rank with the same arguments before training starts.  ValueError, in one line, for a
    Megatron without such a packer, and for a schedule that cannot be.
    """
    named(schedule, ranks, 1, chunks)
    try:
        from megatron.core.datasets import data_schedule

        schedulers: dict[Any, Any] = data_schedule.scheduler_map
    except (ImportError, AttributeError):
        raise ValueError(
            "this Megatron does not pack sequences by a scheduler (megatron.core.datasets.data_schedule has "
            "no scheduler_map); balance the data with megatron_pp_ext.balance where it is read"
        ) from None
    (key,) = (member for member in schedulers if getattr(member, "value", member) == _NAME)
    of_megatron = getattr(schedulers[key], "of_megatron", schedulers[key])
    packing = Packing(schedule, ranks, chunks, most_tokens or 0, equal_at=equal_at, overhead=overhead)
    schedulers[key] = _by_cost(of_megatron, packing)


def _by_cost(of_megatron: Any, packing: Packing) -> type[Any]:
    """Return a scheduler like Megatron's that balances what it has packed."""

    class ByCost(of_megatron):
        def get_groups_and_subsamples(self, sample_id_seqlens: Any) -> Groups:
            """Return the documents of each microbatch and rank; lengths come with the documents' numbers."""
            groups: Groups = super().get_groups_and_subsamples(sample_id_seqlens)
            lengths = [int(length) for _, length in sample_id_seqlens]
            of_step = replace(
                packing,
                most_tokens=packing.most_tokens or int(self.max_seq_len_all_ranks),
                most_documents=getattr(self, "max_num_seqs", None),
                multiple=getattr(self, "microbatch_group_size_per_vp_stage", None) or 1,
            )
            return of_step.balanced(groups, lengths, self.dp_size)

        def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            """Hand over the data of a step; under a V with the loss on the last rank, to both its ends."""
            iterators, *more = super().run(*args, **kwargs)
            return _with_both_ends(iterators), *more

    ByCost.of_megatron = of_megatron
    return ByCost


def _with_both_ends(iterators: Any) -> Any:
    """Return the iterators of a rank's chunks, of which the last rank's all have tokens and labels.

    Megatron gives those to its last chunk alone, and lengths to others; a V has the first stage there too.
    """
    if not isinstance(iterators, list) or any(iterator is None for iterator in iterators):
        return iterators
    make = type(iterators[-1])  # RerunDataIterator, which can be read only once more
    samples = list(iterators[-1].iterable)
    if "labels" not in samples[0]:
        return [*iterators[:-1], make(iter(samples))]
    return [make(iter([dict(sample) for sample in samples])) for _ in iterators]
