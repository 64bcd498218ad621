"""The flags that measure a training run: their steps and their files."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext.files import require_writable

_STEPS = "--pipeline-profile-steps"


@dataclass(frozen=True, slots=True)
class ProfileSteps:
    """Training steps, counted from 1, the last one included."""

    first: int
    last: int

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def number(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1


def profile_steps(given: str | None, train_iters: int | None) -> ProfileSteps | None:
    """The steps that --pipeline-profile-steps requests, None without it; ValueError where there are none."""
    if given is None:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", given)
    if match is None:
        raise ValueError(f"{_STEPS} needs two numbers of training steps such as 5-10, got {given!r}")
    steps = ProfileSteps(*map(int, match.groups()))
    if steps.first < 1:
        raise ValueError(f"{_STEPS} {given} starts before the first step; set it to 1-{max(1, steps.last)}")
    if steps.last < steps.first:
        raise ValueError(f"{_STEPS} {given} ends before it starts; set it to {steps.last}-{steps.first}")
    if train_iters is not None and steps.last >= train_iters:
        raise ValueError(
            f"{_STEPS} {given} leaves no step of --train-iters {train_iters} for the schedule compiled "
            "from them; let it end earlier"
        )
    return steps


def require_files(profile: Path | None, trace: Path | None) -> None:
    """Raise ValueError for a profile or a trace that cannot be written."""
    if profile is not None and not profile.absolute().parent.is_dir():
        raise ValueError(f"--profile-pipeline {profile}: no such folder; make it first")
    for flag, path in (("--profile-pipeline", profile), ("--pipeline-trace", trace)):
        if path is not None:
            require_writable(flag, path)
