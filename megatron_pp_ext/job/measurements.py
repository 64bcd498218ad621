"""The flags that measure a training run: their steps and their files."""

import re
from argparse import Namespace
from dataclasses import dataclass

from megatron_pp_ext.files import require_writable
from megatron_pp_ext.job import layers

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


def profile_steps(args: Namespace) -> ProfileSteps | None:
    """The steps that --pipeline-profile-steps requests, None without it; ValueError where there are none."""
    given = args.pipeline_profile_steps
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
    if args.train_iters is not None and steps.last >= args.train_iters:
        raise ValueError(
            f"{_STEPS} {given} leaves no step of --train-iters {args.train_iters} for the schedule compiled "
            "from them; let it end earlier"
        )
    return steps


def require_files(args: Namespace) -> None:
    """Raise ValueError for a profile or a trace that cannot be written."""
    for flag in ("--profile-pipeline", "--pipeline-trace"):
        path = layers.value(args, flag)
        if path is None:
            continue
        if flag == "--profile-pipeline" and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} {path}: no such folder; make it first")
        require_writable(flag, path)
