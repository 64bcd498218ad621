"""Steps drawn from a distribution of document lengths.

A file of a distribution is a JSON list of lengths in tokens, from which documents are drawn, all with the
same chance.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from megatron_pp_ext.features.lengths.microbatches import LONGEST_DOCUMENT, MOST_DOCUMENTS, Microbatches
from megatron_pp_ext.json_input import naming, read, short

_FIX = "write the document lengths to draw from, such as [4096, 1200, 8000]"


def read_distribution(path: Path) -> list[int]:
    """Read document lengths from ``path``; ValueError, naming the file, for anything else."""
    with naming(path):
        lengths = read(path, _FIX)
        if not isinstance(lengths, list) or not lengths:
            raise ValueError(f"has {short(lengths)}, but must be a list of lengths: {_FIX}")
        if len(lengths) > MOST_DOCUMENTS:
            raise ValueError(
                f"has {len(lengths):,} lengths, at most {MOST_DOCUMENTS:,} are read: leave some out"
            )
        for length in lengths:
            is_length = isinstance(length, int) and not isinstance(length, bool)
            if not is_length or not 0 < length <= LONGEST_DOCUMENT:
                raise ValueError(
                    f"has the length {short(length)}, but a document has 1 to {LONGEST_DOCUMENT:,} tokens: "
                    f"{_FIX}"
                )
        return lengths


def drawn_step(lengths: Sequence[int], microbatches: int, most_tokens: int, random: Random) -> Microbatches:
    """Return a step whose documents are drawn from ``lengths`` and packed in the order in which they come.

    A microbatch has at most ``most_tokens`` tokens: the document that does not fit any more begins the next
    one, and longer documents are cut to this length.
    """
    found: list[list[int]] = []
    waiting = min(random.choice(lengths), most_tokens)
    for _ in range(microbatches):
        own, tokens = [], 0
        while tokens + waiting <= most_tokens:
            own.append(waiting)
            tokens += waiting
            waiting = min(random.choice(lengths), most_tokens)
        found.append(own)
    return Microbatches.of(found)
