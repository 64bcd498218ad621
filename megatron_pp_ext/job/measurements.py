"""The flags that measure a training run, and the refusal of flags that cannot go with them."""

import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_pp_ext.files import require_writable
from megatron_pp_ext.job import layers
from megatron_pp_ext.schedule import catalog

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
    given, name = args.pipeline_profile_steps, args.pipeline_schedule
    if given is None:
        return None
    can = catalog.abilities(name)
    if name is None or not can.flushes or can.file is not None:
        schedule = f"--pipeline-schedule {name}" if name else "Megatron's own schedule"
        raise ValueError(
            f"{_STEPS} {given} compiles a schedule to go on with, which {schedule} leaves no room for; "
            "leave it out, or choose flex, auto or one of `mpp list`"
        )
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


def refuse(args: Namespace) -> None:
    """Raise ValueError for a flag that cannot go with a profile, a trace or a rehearsal."""
    refuse_profile(args)
    if args.pipeline_trace is not None:
        require_writable("--pipeline-trace", args.pipeline_trace)
    refuse_rehearsal(args)


def refuse_profile(args: Namespace) -> None:
    """Raise ValueError for a flag that --profile-pipeline cannot go with, and for a file it cannot write."""
    if args.profile_pipeline is None:
        return
    _refuse_first(
        "--profile-pipeline cannot measure layers beside",
        (
            ("--pipeline-schedule", args.pipeline_schedule is not None, "leave it out"),
            ("--recompute-granularity full", args.recompute_granularity == "full", "leave it out"),
            ("--mtp-num-layers", bool(args.mtp_num_layers), "leave it out"),
            ("--train-iters 1", args.train_iters == 1, "set it to 2 or more: the first step only warms up"),
        ),
    )
    if not args.profile_pipeline.absolute().parent.is_dir():
        raise ValueError(f"--profile-pipeline {args.profile_pipeline}: no such folder; make it first")
    require_writable("--profile-pipeline", args.profile_pipeline)


def refuse_rehearsal(args: Namespace) -> None:
    """Raise ValueError for a flag that --rehearse-pipeline cannot go with."""
    if args.rehearse_pipeline is None:
        return
    name = args.pipeline_schedule
    can = catalog.abilities(name)
    _refuse_first(
        "a rehearsal cannot go with",
        (
            ("--pipeline-schedule auto", can.measures_memory, "choose flex, and give it the limit"),
            (
                f"--pipeline-schedule {name}, which never flushes",
                not can.flushes,
                "choose another schedule",
            ),
            ("--pipeline-trace", args.pipeline_trace is not None, "leave it out"),
            ("--pipeline-profile-steps", args.pipeline_profile_steps is not None, "leave it out"),
            ("--profile-pipeline", args.profile_pipeline is not None, "leave it out"),
            (
                f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}, whose messages "
                "have two lengths",
                any("m" in stage for stage in (layers.layout(args) or [])[:-1]),
                "put the m beside the L",
            ),
        ),
    )
    if not getattr(args, "fake_process_group", False):
        raise ValueError("--rehearse-pipeline needs --fake-process-group; start it with mpp rehearse")


def _refuse_first(why: str, flags: Iterable[tuple[str, bool, str]]) -> None:
    """ValueError for the first of ``flags`` (its spelling, whether it is set, the fix) that is set."""
    for flag, is_set, fix in flags:
        if is_set:
            raise ValueError(f"{why} {flag}; {fix}")
