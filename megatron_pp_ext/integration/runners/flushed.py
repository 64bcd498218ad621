"""Megatron's forward-backward contract on one side, the executor on the other.

``get_forward_backward_func`` is asked for a function that runs all microbatches of a training or
evaluation step; this module answers with one that runs the schedule in force.  What stock does
around the microbatches (timers, gradient finalization, the loss store on the last rank) is done here,
what it does for one microbatch is stock's own ``forward_step`` and ``backward_step``.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.hooks import engine_linear
from megatron_pp_ext.integration.hooks.data_parallel import DataParallel
from megatron_pp_ext.integration.request.refusals import refuse_unsupported_config
from megatron_pp_ext.integration.request.sources import least_free_bytes
from megatron_pp_ext.integration.runners import paged_stash, tracing
from megatron_pp_ext.integration.runners.losses_home import LossesHome
from megatron_pp_ext.integration.runners.message_groups import message_groups
from megatron_pp_ext.integration.runners.model_stage import StepInputs, model_stages, timed
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import Recorder, execute
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule


class PipelineRunner:
    """Runs training and evaluation steps under one pipeline's schedules.

    Called with what Megatron passes to its own forward-backward functions (keywords only).  What
    does not change from step to step is kept: process groups, and each schedule once built.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        self.pipeline = pipeline
        self._plans: dict[tuple[int, bool, Hashable], RankPlan] = {}
        self._training_steps = 0
        self._is_split = False
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._losses_home: LossesHome | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run ``num_microbatches`` forwards, and backwards unless ``forward_only``.

        Returns the loss store, one entry a microbatch, on the last pipeline rank, where Megatron
        looks for it, and an empty list elsewhere.  ``p2p_communicator`` is not used.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "--pipeline-schedule does not support modelopt's distillation, which adjusts the shapes of "
                "messages; leave one of the two out"
            )
        refuse_multimodule(p2p_communicator, pg_collection)
        model = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(model[0])
        refuse_unsupported_config(config)
        if not self._is_split:
            engine_linear.split_backwards(model)
            self._is_split = True
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        data_parallel = DataParallel(model, config, forward_only, bool(force_all_reduce))
        inputs = StepInputs(
            forward_step_func=forward_step_func,
            model=model,
            iterators=iterators,
            microbatches=num_microbatches,
            config=config,
            cp_size=groups.cp.size(),
            data_parallel=data_parallel,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        (shape,) = stock_schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        paged_stash.begin_step(config, forward_only)
        clock = timed(config, "forward-backward", level=1, barrier=config.barrier_with_L1_time)
        with clock, self._recording(groups.pp, inputs) as recorder:
            with data_parallel.step():
                self._run(inputs, groups.pp, shape, recorder)
            if len(STORE):
                raise RuntimeError(f"{len(STORE)} weight gradients were left at the end of the step")
            home = self._home(groups.pp)
            if config.finalize_model_grads_func is not None and not forward_only:
                tokens = None
                if config.calculate_per_token_loss:
                    tokens = home.bring_tokens(inputs.tokens) if home else inputs.tokens
                config.finalize_model_grads_func(
                    model, tokens, pg_collection=groups, force_all_reduce=force_all_reduce
                )
            # The last rank's host waits for them, so they come behind all that it launches in this step.
            losses = home.bring_losses(inputs.losses) if home else inputs.losses
        self._training_steps += not forward_only
        return losses

    def _recording(self, group: dist.ProcessGroup, inputs: StepInputs) -> AbstractContextManager[Any]:
        return tracing.recording(group, inputs.model, inputs.forward_only)

    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        plan = self._plan(inputs.microbatches, inputs.forward_only, group)
        stages = model_stages(inputs, self.pipeline.placement, plan)
        execute(plan, stages, self._channels(group, shape, inputs.config), recorder)

    def _channels(self, group: dist.ProcessGroup, shape: Any, config: Any) -> Channels:
        return message_channels(group, self._directions(group), shape, config)

    def _directions(self, group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if self._groups is None:
            self._groups = message_groups(group)
        return self._groups

    def _plan(self, microbatches: int, forward_only: bool, group: dist.ProcessGroup) -> RankPlan:
        key = microbatches, forward_only, self._phase()
        if key not in self._plans:
            schedule = self._schedule(microbatches, forward_only, group)
            require_same_on_all(schedule)
            self._plans[key] = plan_rank(schedule, group.rank())
        return self._plans[key]

    def _phase(self) -> Hashable:
        """Changes whenever schedules have to be built anew."""
        return self._training_steps > 0

    def _schedule(self, microbatches: int, forward_only: bool, group: dist.ProcessGroup) -> Schedule:
        if forward_only:
            return catalog.forward_only(self.pipeline.placement, microbatches)
        assert self.pipeline.source is not None
        return self.pipeline.source.build(microbatches, least_free_bytes if self._training_steps else None)

    def _home(self, group: dist.ProcessGroup) -> LossesHome | None:
        """How losses get to the last rank of ``group``; None where that is the rank that has them."""
        holder = self.pipeline.placement.rank_of(self.pipeline.placement.stages - 1)
        if holder == group.size() - 1:
            return None
        if self._losses_home is None:
            self._losses_home = self._make_home(holder, group)
        return self._losses_home

    def _make_home(self, holder: int, group: dist.ProcessGroup) -> LossesHome:
        return LossesHome(holder, group, self._directions(group)[0], tracing.device())


def message_channels(
    group: dist.ProcessGroup, directions: tuple[dist.ProcessGroup, dist.ProcessGroup], shape: Any, config: Any
) -> Channels:
    """Channels between the ranks of the pipeline ``group`` for messages of ``shape``."""
    ranks = dist.get_process_group_ranks(group)
    return Channels(ranks, *directions, shape, config.pipeline_dtype, tracing.device())


def refuse_multimodule(*given: Any) -> None:
    """MIMO's modules have pipelines of their own, between which stock's schedule carries messages."""
    if any(type(one).__name__.startswith("MultiModule") for one in given):
        raise ValueError(
            "--pipeline-schedule does not support MIMO, whose modules have pipelines of their own; leave one "
            "of the two out"
        )


def require_same_on_all(schedule: Schedule) -> None:
    """Two ranks that run different schedules would wait for each other for ever.

    Those of another pipeline too, with which a rank shares experts, a context or a reduction.
    """
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, schedule.digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise RuntimeError(
            f"ranks 0 and {other} of this job built different schedules for {schedule.name!r} ({digests[0]} "
            f"and {digests[other]}); all must run the same megatron_pp_ext with the same flags and files"
        )
