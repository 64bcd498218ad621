"""A job with the flags that describe it, and what is known of its schedule and its machine.

Rules about what cannot be combined (``job.rules``) ask it.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron_pp_ext.job.attention_part import Attention
from megatron_pp_ext.job.flags import Flags
from megatron_pp_ext.job.memory_part import Memory
from megatron_pp_ext.job.parts import Batch, Model, Parallel
from megatron_pp_ext.job.pipeline_part import PipelinePart
from megatron_pp_ext.job.precision_part import Precision
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement

ENGINE = "transformer-engine"
"""The name of the package whose layers run on GPUs."""

FIRST_ENGINE = "2.3"
"""The first Transformer Engine whose modules have a store (``WeightGradStore``, module/_common.py)."""


@dataclass(frozen=True, slots=True)
class RequestedJob:
    """The ``job`` that ``args`` describe, the ``flags`` that no part of it has, and what follows from them.

    What the schedule decides is None as long as it has not been read; rules about it do not hold then.
    """

    args: Namespace
    releases: Mapping[str, str] = field(default_factory=dict)
    """The versions of packages, by name, where the machine that trains is known; "0.0.0" means none."""
    placement: Placement | None = None
    chunks: int | None = None
    """The chunks a rank, at most; known where the placement is not settled yet."""
    splits: bool | None = None
    """Whether the backward is split into input and weight gradients."""
    from_file: Schedule | None = None
    """The schedule of ``csv:FILE``."""
    job: Job = field(init=False)
    flags: Flags = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", Job.of(self.args))
        object.__setattr__(self, "flags", Flags.of(self.args))

    def changed(self, **values: Any) -> Self:
        """Return the same with other ``values`` of arguments."""
        return replace(self, args=Namespace(**{**vars(self.args), **values}))

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
    def model(self) -> Model:
        return self.job.model

    @property
    def attention(self) -> Attention:
        return self.job.attention

    @property
    def parallel(self) -> Parallel:
        return self.job.parallel

    @property
    def batch(self) -> Batch:
        return self.job.batch

    @property
    def precision(self) -> Precision:
        return self.job.precision

    @property
    def memory(self) -> Memory:
        return self.job.memory

    @property
    def pipeline(self) -> PipelinePart:
        return self.job.pipeline

    @property
    def is_v(self) -> bool:
        """Whether one rank has both the embedding and the output layer, as far as the placement is known."""
        return self.placement is not None and self.placement.turns_round

    @property
    def changes_its_order(self) -> bool:
        """Whether another order takes the place of the first one while the job runs."""
        return self.pipeline.can.measures_memory or self.flags.pipeline_profile_steps is not None
