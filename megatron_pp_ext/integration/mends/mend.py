"""What a mend is: hooks where stock Megatron itself is wrong, and how a maintainer sees that they can go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import Number

Hooks = Mapping[str, tuple[Mapping[Number, str | None], Callable[[Any], Any]]]
"""By each place, as in ``Seam``: its parameters since each release, and the hook."""


@dataclass(frozen=True, slots=True)
class Mend:
    """One defect of Megatron's and what is put in its place.

    ``defect`` says under which flags what goes wrong.  ``releases`` are those that have the defect.  ``test``
    fails without the mend as long as Megatron has the defect: to see whether it can go, take it out of the
    table in ``mends.table`` and run the test.  ``hooks`` is empty where other hooks of ours call the mend.
    """

    defect: str
    releases: str
    test: str
    hooks: Hooks = field(default_factory=dict)

    @property
    def seams(self) -> list[Seam]:
        """What of Megatron is replaced."""
        return [Seam(place, known, hook, self.defect) for place, (known, hook) in self.hooks.items()]


EVERY = "every release"
