"""The request for a schedule that is compiled from steps of its own run."""

import re
from dataclasses import dataclass

from megatron_pp_ext.compiler.request import Option

_STEPS = "--pipeline-profile-steps"


@dataclass(frozen=True, slots=True)
class ProfileSteps(Option):
    """Training steps to measure, counted from 1, the last one included.

    A better schedule is compiled from them.  Whole backwards come in two halves there, so that each half has
    a duration.
    """

    first: int
    last: int

    splits_backward = True

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def number(self) -> int:
        return self.last - self.first + 1

    @property
    def measured_by(self) -> str:
        return f"{_STEPS} {self}"

    @property
    def until(self) -> str:
        return f"until steps {self} are measured"


def profile_steps(given: str, train_iters: int | None) -> ProfileSteps:
    """Return the steps that --pipeline-profile-steps requests; ValueError where there are none."""
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
