"""A training run's settings, from Megatron's arguments."""

from argparse import Namespace
from datetime import timedelta
from functools import partial
from pathlib import Path

from megatron_pp_ext.costs.costs_of_stages import message_bytes
from megatron_pp_ext.integration import products
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.settings import PIPELINE, Settings
from megatron_pp_ext.integration.trainer.caveat import caveat
from megatron_pp_ext.job.typed_job import Job


def settings(args: Namespace, pipeline: Pipeline) -> Settings:
    """Return the settings of the run that ``args`` describe, with ``pipeline``.

    Megatron goes on changing ``args`` while it starts and trains, so what changes is read when it is needed.
    """
    communicators = args.nccl_communicator_config_path
    return Settings(
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        communicators=None if communicators is None else Path(communicators),
        has_priority=PIPELINE in (args.high_priority_stream_groups or ()),
        clip_grad=args.clip_grad,
        train_steps=lambda: int(args.train_iters),
        steps_done=lambda counted: int(getattr(args, "curr_iteration", 0)),
        message_bytes=lambda: message_bytes(Job.of(args)),
        advice=lambda *measured: products.loaded().better_layout(
            Job.of(args), args.data_parallel_size, *measured
        ),
        costs_at=pipeline.settings.costs_at,
        caveat=partial(caveat, pipeline, args),
    )
