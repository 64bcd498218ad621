"""How far the seconds of a rehearsal can be believed, from what disturbed its ranks while they ran."""

from collections.abc import Iterable
from statistics import median, quantiles

from megatron_pp_ext.processor import MOST_WAITED
from megatron_pp_ext.schedule.formats.rehearsal_file import RankRehearsal

MOST_SPREAD = 0.2
"""The most that the middle half of a rank's timed steps may spread, as a part of their median.

Rehearsed steps differ from real ones by up to a tenth on a quiet machine (benchmarks/results/rehearse.md), so
that a wider spread says more of the machine than of the job.
"""


def described(measured: Iterable[RankRehearsal]) -> str:
    """Return a line with the widest spread of a rank's steps, its longest waits, and the machine's load."""
    ranks = list(measured)
    words = []
    known = [one for one in ranks if len(one.step_seconds) > 1]
    if known:
        worst = max(known, key=_spread)
        low, _, high = quantiles(worst.step_seconds, method="inclusive")
        words.append(
            f"timed steps spread most on rank {worst.rank}, where the middle half of "
            f"{len(worst.step_seconds)} took {low:.4g} to {high:.4g} s"
        )
    else:
        words.append("too few timed steps to tell how they spread")
    waits = [one.waited for one in ranks if one.waited is not None]
    if waits:
        words.append(f"ranks waited for a processor for up to {max(waits):.1%} of their time")
    loads = [one.load for one in ranks if one.load is not None]
    if loads:
        words.append(f"the machine's load was up to {max(loads):.2g} a processor")
    return "; ".join(words)


def disturbance(measured: Iterable[RankRehearsal]) -> str | None:
    """Return why the seconds of a rank say more of its machine than of the job; None if no rank's do."""
    for one in measured:
        if one.waited is not None and one.waited > MOST_WAITED:
            return (
                f"rank {one.rank} waited for a processor for {one.waited:.0%} of its time, more than "
                f"{MOST_WAITED:.0%}"
            )
        if len(one.step_seconds) > 1 and _spread(one) > MOST_SPREAD:
            return (
                f"the middle half of the steps of rank {one.rank} spread over {_spread(one):.0%} of their "
                f"median, more than {MOST_SPREAD:.0%}"
            )
    return None


def require_quiet(measured: Iterable[RankRehearsal]) -> None:
    """Raise ValueError where the seconds of a rank say more of its machine than of the job."""
    reason = disturbance(measured)
    if reason is not None:
        raise ValueError(
            f"the seconds are not to be believed: {reason}: end what else runs, lower --at-once, raise "
            "--iterations, or add --accept-noise"
        )


def _spread(one: RankRehearsal) -> float:
    low, _, high = quantiles(one.step_seconds, method="inclusive")
    return (high - low) / median(one.step_seconds)
