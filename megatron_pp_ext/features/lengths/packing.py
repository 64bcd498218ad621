"""Documents into microbatches of Megatron's packer, by cost instead of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.lengths.balance import balance, seconds_of
from megatron_pp_ext.features.lengths.length_costs import EQUAL_AT

Groups = list[list[list[int]]]
"""For each microbatch and each data- and context-parallel rank, the numbers of the documents in it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents are packed: under ``schedule`` with so many pipeline ``ranks`` and chunks a rank.

    A document of ``equal_at`` tokens takes as long for attention as for all else.  A microbatch has at most
    ``most_tokens`` tokens, and ``most_documents`` documents where that is not None.
    """

    schedule: str
    ranks: int
    chunks: int | None
    most_tokens: int
    most_documents: int | None = None
    equal_at: float = EQUAL_AT

    def balanced(self, given: Groups, lengths: Sequence[int], replicas: int) -> Groups:
        """Return the same documents in as many microbatches, balanced over replicas by cost.

        ``given`` are Megatron's groups, in which each replica has as many ranks next to each other, all with
        the same documents.  They stay where a balanced step would not be shorter by simulation, each replica
        with its microbatches ordered by the rule of the schedule, and where documents do not fit.
        """
        count, copies = len(given), len(given[0]) // replicas
        before = [[group[replica * copies] for group in given] for replica in range(replicas)]
        try:
            request = named(self.schedule, self.ranks, count, self.chunks)
            after = balance(lengths, replicas, count, most_tokens=self.most_tokens, equal_at=self.equal_at)
            balanced, as_given = (seconds_of(one, lengths, request, self.equal_at) for one in (after, before))
        except ValueError:
            return given
        most = self.most_documents
        if balanced >= as_given or (
            most is not None and any(len(part) > most for one in after for part in one)
        ):
            return given
        return [
            [list(after[replica][number]) for replica in range(replicas) for _ in range(copies)]
            for number in range(count)
        ]
