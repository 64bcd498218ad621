"""A job with the flags that describe it, and what is known of its schedule and its machine.

Rules about what cannot be combined (``job.rules``) ask it.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron_pp_ext.job.flags import Flags
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement

ENGINE = "transformer-engine"
"""The name of the package whose layers run on GPUs."""

FIRST_ENGINE = "2.3"
"""The first Transformer Engine whose modules have a store (``WeightGradStore``, module/_common.py)."""


@dataclass(frozen=True)
class RequestedJob(Job):
    """A job as ``args`` describe it, with the ``flags`` that no part has, and where it runs.

    Two are equal where they compute the same, whatever other arguments they have.

    What the schedule decides is None as long as it has not been read; rules about it do not hold then.
    """

    args: Namespace = field(default_factory=Namespace, compare=False)
    flags: Flags = field(default_factory=Flags, compare=False)
    releases: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The versions of packages, by name, where the machine that trains is known; "0.0.0" means none."""
    placement: Placement | None = None
    chunks: int | None = None
    """The chunks a rank, at most; known where the placement is not settled yet."""
    splits: bool | None = None
    """Whether the backward is split into input and weight gradients."""
    from_file: Schedule | None = field(default=None, hash=False)
    """The schedule of ``csv:FILE``."""

    @classmethod
    def of_args(cls, args: Namespace, releases: Mapping[str, str] | None = None, **schedule: Any) -> Self:
        """Return the job that ``args`` describe; ``schedule`` are the fields that the schedule decides."""
        args = Namespace(**vars(args))  # Megatron goes on to complete its own
        return cls(**vars(Job.of(args)), args=args, flags=Flags.of(args), releases=releases or {}, **schedule)

    def with_arguments(self, **values: Any) -> Self:
        """Return the job that the arguments describe with other ``values``.

        ``changed`` changes parts alone, as an estimate of another job does.
        """
        args = Namespace(**{**vars(self.args), **values})
        return replace(self, **vars(Job.of(args)), args=args, flags=Flags.of(args))

    def argument(self, name: str) -> Any:
        """Return the value of the argument ``name``; None where this release of Megatron has no such flag."""
        return getattr(self.args, name, None)

    def is_set(self, flag: str, value: str | None = None) -> bool:
        """Whether ``flag``, spelled with dashes, has a value other than none, off and 0.

        With ``value``, whether that is its value, or among its values.
        """
        found = self.argument(flag.removeprefix("--").replace("-", "_"))
        if value is None:
            return bool(found)
        return value in map(str, found if isinstance(found, list | tuple | frozenset) else (found,))

    @property
    def is_v(self) -> bool:
        """Whether one rank has both the embedding and the output layer, as far as the placement is known."""
        return self.placement is not None and self.placement.turns_round

    @property
    def changes_its_order(self) -> bool:
        """Whether another order takes the place of the first one while the job runs."""
        return self.pipeline.can.measures_memory or self.flags.pipeline_profile_steps is not None
