"""Documents into microbatches of Megatron's packer, by cost instead of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp_ext.features.lengths.balance import balance
from megatron_pp_ext.features.lengths.length_costs import EQUAL_AT, OVERHEAD

Groups = list[list[list[int]]]
"""For each microbatch and each data- and context-parallel rank, the numbers of the documents in it."""

_PARTS = 0.67, 1.0, 1.25, 1.5, 2.0, 3.0
"""The numbers of microbatches that are tried, as parts of Megatron's."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents are packed: under ``schedule`` with so many pipeline ``ranks`` and chunks a rank.

    A document of ``equal_at`` tokens takes as long for attention as for all else, and a microbatch costs
    ``overhead`` tokens on top of its own.  A microbatch has at most ``most_tokens`` tokens, and
    ``most_documents`` documents where that is not None.  Their number is a ``multiple`` of one that Megatron
    requires.
    """

    schedule: str
    ranks: int
    chunks: int | None
    most_tokens: int
    most_documents: int | None = None
    equal_at: float = EQUAL_AT
    overhead: float = OVERHEAD
    multiple: int = 1

    def balanced(self, given: Groups, lengths: Sequence[int], replicas: int) -> Groups:
        """Return the same documents in the microbatches of the shortest step, balanced over replicas by cost.

        ``given`` are Megatron's groups, in which each replica has as many ranks next to each other, all with
        the same documents.  They stay where no other step is shorter by simulation, each replica with its
        microbatches ordered by the rule of the schedule, and where documents do not fit.
        """
        copies = len(given[0]) // replicas
        before = [[group[replica * copies] for group in given] for replica in range(replicas)]
        try:
            after = balance(
                lengths,
                replicas,
                self.counts(len(given), len(lengths) // replicas),
                most_tokens=self.most_tokens,
                equal_at=self.equal_at,
                schedule=self.schedule,
                ranks=self.ranks,
                chunks=self.chunks,
                overhead=self.overhead,
                given=before,
            )
        except ValueError:  # the schedule cannot run as many microbatches as Megatron has
            return given
        most = self.most_documents
        if after == before or (most is not None and any(len(part) > most for one in after for part in one)):
            return given
        return [
            [list(share[number]) for share in after for _ in range(copies)] for number in range(len(after[0]))
        ]

    def counts(self, given: int, documents: int) -> list[int]:
        """Return the numbers of microbatches to try, where Megatron has ``given`` of them.

        None is above the number of ``documents`` of a replica.
        """
        multiple = self.multiple
        tried = (max(1, round(part * given / multiple)) * multiple for part in _PARTS)
        return sorted({count for count in tried if count <= documents} | {given})
