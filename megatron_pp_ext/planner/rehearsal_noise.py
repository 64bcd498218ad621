"""The reliability of a rehearsal's seconds, from the disturbances of its ranks while they ran."""

from collections.abc import Iterable
from statistics import median, quantiles

from megatron_pp_ext.processor import MOST_WAITED
from megatron_pp_ext.schedule.formats.rehearsal_file import RankRehearsal

MOST_SPREAD = 0.2
"""The most that the middle half of a rank's timed steps may spread, as a part of their median.

Rehearsed steps differ from real ones by up to a tenth on a quiet machine (benchmarks/results/rehearse.md), so
that a wider spread comes from the machine more than from the job.
"""


def described(measured: Iterable[RankRehearsal]) -> str:
    """Return a line with the widest spread of a rank's steps, its longest waits, and the machine's load."""
    ranks = list(measured)
    words = []
    repeated = [rank for rank in ranks if len(rank.step_seconds) > 1]
    if repeated:
        worst = max(repeated, key=_spread)
        low, _, high = quantiles(worst.step_seconds, method="inclusive")
        words.append(
            f"timed steps spread most on rank {worst.rank}, where the middle half of "
            f"{len(worst.step_seconds)} took {low:.4g} to {high:.4g} s"
        )
    else:
        words.append("too few timed steps to tell how they spread")
    waits = [rank.waited for rank in ranks if rank.waited is not None]
    if waits:
        words.append(f"ranks waited for a processor for up to {max(waits):.1%} of their time")
    loads = [rank.load for rank in ranks if rank.load is not None]
    if loads:
        words.append(f"the machine's load was up to {max(loads):.2g} a processor")
    return "; ".join(words)


def disturbance(measured: Iterable[RankRehearsal]) -> str | None:
    """Return why a rank's seconds depend more on its machine than on the job; None if no rank's do."""
    for rehearsal in measured:
        if rehearsal.waited is not None and rehearsal.waited > MOST_WAITED:
            return (
                f"rank {rehearsal.rank} waited for a processor for {rehearsal.waited:.0%} of its time, "
                f"more than {MOST_WAITED:.0%}"
            )
        if len(rehearsal.step_seconds) > 1 and _spread(rehearsal) > MOST_SPREAD:
            return (
                f"the middle half of the steps of rank {rehearsal.rank} spread over "
                f"{_spread(rehearsal):.0%} of their median, more than {MOST_SPREAD:.0%}"
            )
    return None


def require_quiet(measured: Iterable[RankRehearsal]) -> None:
    """Raise ValueError where a rank's seconds depend more on its machine than on the job."""
    reason = disturbance(measured)
    if reason is not None:
        raise ValueError(
            f"the seconds are not to be believed: {reason}: end what else runs, lower --at-once, raise "
            "--iterations, or add --accept-noise"
        )


def _spread(rehearsal: RankRehearsal) -> float:
    low, _, high = quantiles(rehearsal.step_seconds, method="inclusive")
    return (high - low) / median(rehearsal.step_seconds)
