"""Flags under which gradients are summed in another order than stock's, as features register them."""

from dataclasses import dataclass

from megatron_pp_ext.registered import Registered


@dataclass(frozen=True, slots=True)
class OtherSums:
    """What ``flag`` does to the sums of a job, and ``why``.

    ``fp32`` is how much a gradient of the first step may differ, relative to its largest number, and
    ``lower`` the same where the job trains in a lower precision.
    """

    flag: str
    why: str
    fp32: float
    lower: float


_registered = Registered[OtherSums]()
register = _registered.add
"""Adds ``OtherSums``, which count wherever a job with their flag is compared with stock."""


def other_sums(flags: frozenset[str]) -> OtherSums | None:
    """Return what the first registered one of ``flags`` does, or None where no flag changes sums."""
    return next((sums for sums in _registered if sums.flag in flags), None)
