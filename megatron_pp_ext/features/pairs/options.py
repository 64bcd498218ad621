"""The request for pairs of a forward and a backward."""

from dataclasses import dataclass

from megatron_pp_ext.compiler.request import Option, Request
from megatron_pp_ext.schedule.costs import Costs

_UNPROVED = (
    "a pair takes {:.2f} of its forward and backward; no published run in pairs with a pipeline was compared "
    "with this"
)
"""The note of an estimate in pairs; it takes ``Costs.pair``."""


@dataclass(frozen=True, slots=True)
class Pairs(Option):
    """Forwards and backwards run in pairs where the order has a place for them.

    A B in a pair leaves its weight gradients to where Megatron's plans of layers compute them.
    """

    splits_backward = True

    def caution(self, ranks: int, costs: Costs) -> str:
        return _UNPROVED.format(costs.pair) if ranks > 1 else ""


def paired(request: Request, is_paired: bool = True) -> Request:
    """Return ``request`` with pairs, or as it is unless ``is_paired``."""
    return request.with_option(Pairs()) if is_paired else request
