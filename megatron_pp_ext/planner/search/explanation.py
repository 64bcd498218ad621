"""Why a configuration is slower than the best one."""

from megatron_pp_ext.planner.search.best_first import Evaluated

_WORTH_TELLING = 0.002
"""The least difference, as a fraction of the step, that is named."""


def why(best: Evaluated, other: Evaluated) -> str:
    """Where ``other`` loses its seconds, the largest loss first; empty for the best itself."""
    losses = [
        (gain, name)
        for (name, more), (_, less) in zip(_seconds(other), _seconds(best), strict=True)
        if (gain := more - less) > _WORTH_TELLING * best.estimate.step_seconds
    ]
    recompute = other.candidate.recompute
    told = []
    for gain, name in sorted(losses, reverse=True):
        is_recomputing = name == "work" and recompute.granularity and recompute != best.candidate.recompute
        told.append(f"{name} +{gain:.3g} s" + (f" ({recompute.name})" if is_recomputing else ""))
    return ", ".join(told)


def _seconds(one: Evaluated) -> list[tuple[str, float]]:
    """What fills a step: an average rank's work and idling, and what follows the pipeline."""
    found = one.estimate
    idle = found.bubble * found.pipeline_seconds
    return [
        ("work", found.pipeline_seconds - idle),
        ("bubble", idle),
        ("reductions and update", found.other_seconds),
    ]
