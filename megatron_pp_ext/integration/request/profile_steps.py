"""--pipeline-profile-steps: which training steps to measure."""

import re
from argparse import Namespace
from dataclasses import dataclass

from megatron_pp_ext.integration.request import sources, updates

FLAG = "--pipeline-profile-steps"


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
        """How many they are."""
        return self.last - self.first + 1


def read(args: Namespace) -> ProfileSteps | None:
    """What ``args`` ask for, None if nothing; ValueError in one line where it makes no sense."""
    asked, name = args.pipeline_profile_steps, args.pipeline_schedule
    if asked is None:
        return None
    if name is None or name in updates.NAMES or name.startswith(sources.CSV_PREFIX):
        schedule = f"--pipeline-schedule {name}" if name else "Megatron's own schedule"
        raise ValueError(
            f"{FLAG} {asked} compiles a schedule to go on with, which {schedule} leaves no room for; "
            "leave it out, or choose flex, auto or one of `mpp list`"
        )
    match = re.fullmatch(r"(\d+)-(\d+)", asked)
    if match is None:
        raise ValueError(f"{FLAG} wants two numbers of training steps such as 5-10, got {asked!r}")
    steps = ProfileSteps(*map(int, match.groups()))
    if steps.first < 1:
        raise ValueError(f"{FLAG} {asked} starts before the first step; set it to 1-{max(1, steps.last)}")
    if steps.last < steps.first:
        raise ValueError(f"{FLAG} {asked} ends before it starts; set it to {steps.last}-{steps.first}")
    if args.train_iters is not None and steps.last >= args.train_iters:
        raise ValueError(
            f"{FLAG} {asked} leaves no step of --train-iters {args.train_iters} for the schedule compiled "
            "from them; let it end earlier"
        )
    return steps
