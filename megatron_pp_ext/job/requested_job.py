"""A job with the flags that no part of it has, and what is known of its schedule and its machine."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Flags:
    """Arguments under Megatron's names; None where no flag gives one, or a release has no such flag.

    No estimate counts them: rules about what cannot be combined (``job.rules``) ask for them, and the start
    of a job.
    """

    barrier_with_L1_time: bool | None = None
    ckpt_format: str | None = None
    dataloader_type: str | None = None
    delay_wgrad_compute: bool | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    fake_process_group: bool | None = None
    fine_grained_activation_offloading: bool | None = None
    full_validation: bool | None = None
    loss_scale: float | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    multiple_validation_sets: bool | None = None
    overlap_p2p_comm_warmup_flush: bool | None = None
    pipeline_layer_seeds: bool | None = None
    pipeline_order: Literal["given", "rule", "search"] | None = None
    pipeline_profile_steps: str | None = None
    pipeline_unproved: bool | None = None
    profile_pipeline: Path | None = None
    rehearse_pipeline: Path | None = None
    save: str | None = None
    spec: list[str] | None = None
    tensor_parallel_num_weight_shards: int | None = None
    timing_log_level: int | None = None
    tokenizer_model: str | None = None
    tokenizer_type: str | None = None
    train_iters: int | None = None
    use_tp_pp_dp_mapping: bool | None = None

    @classmethod
    def of(cls, args: object) -> Self:
        """Return the flags of ``args``, which has arguments under their names."""
        return cls(**{field.name: getattr(args, field.name, None) for field in fields(cls)})


ENGINE, CORE = "transformer-engine", "megatron-core"
"""The names of the packages with the layers that run on GPUs, and of Megatron."""

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
    """The chunks a rank, at most; known where the placement is still open."""
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
        setting = self.argument(flag.removeprefix("--").replace("-", "_"))
        if value is None:
            return bool(setting)
        return value in map(str, setting if isinstance(setting, list | tuple | frozenset) else (setting,))

    @property
    def is_v(self) -> bool:
        """Whether one rank has both the embedding and the output layer, as far as the placement is known."""
        return self.placement is not None and self.placement.turns_round

    @property
    def changes_its_order(self) -> bool:
        """Whether another order takes the place of the first one while the job runs."""
        return self.pipeline.can.measures_memory or self.flags.pipeline_profile_steps is not None
