"""Hooks where stock Megatron itself is wrong, and how a maintainer sees that they can go."""

from typing import NamedTuple


class Workaround(NamedTuple):
    """One defect of Megatron's and what is put in its place.

    ``defect`` states under which flags what goes wrong.  ``releases`` are those that have the defect.
    ``test`` fails without the workaround as long as Megatron has the defect: to see whether it can go, take
    it out of the table in ``workarounds.table`` and run the test.  Its hooks are in its file, unless other
    hooks of ours call it.
    """

    defect: str
    releases: str
    test: str


EVERY = "every release"
