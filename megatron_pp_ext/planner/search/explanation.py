"""The reasons why a configuration is slower than the best one."""

from megatron_pp_ext.planner.search.replays import Evaluated

_NAMED = 0.002
"""The least difference, as a fraction of the best step, that is named."""


def why(best: Evaluated, other: Evaluated) -> str:
    """Return where ``other`` loses its seconds, the largest loss first; empty for the best itself."""
    losses = [
        (gain, name)
        for (name, more), (_, less) in zip(_seconds(other), _seconds(best), strict=True)
        if (gain := more - less) > _NAMED * best.estimate.step_seconds
    ]
    recompute = other.candidate.recompute
    reasons = []
    for gain, name in sorted(losses, reverse=True):
        is_recomputing = name == "work" and recompute.granularity and recompute != best.candidate.recompute
        reasons.append(f"{name} +{gain:.3g} s" + (f" ({recompute.name})" if is_recomputing else ""))
    return ", ".join(reasons)


def _seconds(evaluated: Evaluated) -> list[tuple[str, float]]:
    """Return the parts of a step: an average rank's work and idling, and the time after the pipeline."""
    estimate = evaluated.estimate
    idle = estimate.bubble * estimate.pipeline_seconds
    return [
        ("work", estimate.pipeline_seconds - idle),
        ("bubble", idle),
        ("reductions and update", estimate.other_seconds),
    ]
