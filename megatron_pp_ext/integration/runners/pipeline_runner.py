"""Megatron's forward-backward contract, which all runners keep.

``get_forward_backward_func`` returns a function that runs all microbatches of a training or evaluation step,
and a ``PipelineRunner`` is such a function.  It does what stock does around the microbatches: timers,
gradient finalization, the loss store on the last rank.  One microbatch is stock's own ``forward_step`` and
``backward_step``, see ``model_stage``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.core import engine_linear, late_checks
from megatron_pp_ext.integration.core.data_parallel import DataParallel
from megatron_pp_ext.integration.core.frozen_copies import require_alike
from megatron_pp_ext.integration.runners import paged_stash, tracing
from megatron_pp_ext.integration.runners.losses_to_last_rank import LossTransfer
from megatron_pp_ext.integration.runners.message_groups import device, message_groups
from megatron_pp_ext.integration.runners.model_stage import StepInputs, timed
from megatron_pp_ext.job.rules.all_rules import refuse_config
from megatron_pp_ext.runtime.executor import Recorder
from megatron_pp_ext.runtime.split import STORE


class PipelineRunner(ABC):
    """Runs training and evaluation steps of one pipeline.

    Called with what Megatron passes to its own forward-backward functions (keywords only).  Process groups,
    and whatever else stays the same from step to step, are kept.

    A subclass implements ``_run``, and may override ``_recording``, ``_tokens_of_step`` and
    ``_losses_on_last_rank``.  All ranks of the job call these methods in the same steps and in the same
    order, so each of them may communicate, as long as it does so on every rank.
    """

    def __init__(self, pipeline: requested.Pipeline) -> None:
        self.pipeline = pipeline
        self._training_steps = 0
        self._is_split = False
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._transfer: LossTransfer | None = None

    @abstractmethod
    def _run(
        self, inputs: StepInputs, group: dist.ProcessGroup, shape: Any, recorder: Recorder | None
    ) -> None:
        """Run every action that this rank of the pipeline ``group`` has in the step.

        ``shape`` is that of a message.  ``inputs.forward_only`` is set in an evaluation.  On return the
        losses and tokens of this rank's stages are in ``inputs``, and ``runtime.split.STORE`` holds no weight
        gradient.  ``recorder``, if there is one, is given to ``executor.execute``.
        """

    def _recording(
        self, group: dist.ProcessGroup, inputs: StepInputs
    ) -> AbstractContextManager[Recorder | None]:
        """Return a context around the whole step that yields the recorder for ``_run``, or None."""
        return tracing.recording(group, inputs.model, inputs.forward_only)

    def _tokens_of_step(self, inputs: StepInputs, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the step's count of tokens, which the last rank of ``group`` must have.

        Called before gradients are finalized, only under --calculate-per-token-loss.
        """
        transfer = self._loss_transfer(group)
        return transfer.bring_tokens(inputs.tokens) if transfer else inputs.tokens

    def _losses_on_last_rank(self, inputs: StepInputs, group: dist.ProcessGroup) -> list[Any]:
        """Return the loss store on the last rank of ``group``; other ranks may return an empty list.

        Called last: the last rank's host waits for the losses, so all else that it launches in this step
        has to come before.
        """
        transfer = self._loss_transfer(group)
        return transfer.bring_losses(inputs.losses) if transfer else inputs.losses

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

        ValueError for what no schedule supports: distillation, MIMO, some settings of the model's config.
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
        refuse_config(config)
        if not self._is_split:
            require_alike(model)
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
        if config.mtp_standalone:
            shape = ()  # behind the prediction a message holds the hidden states of several tokens
        paged_stash.begin_step(config, forward_only)
        clock = timed(config, "forward-backward", level=1, barrier=config.barrier_with_L1_time)
        with clock, self._recording(groups.pp, inputs) as recorder, late_checks.put_off():
            with data_parallel.step():
                self._run(inputs, groups.pp, shape, recorder)
            if len(STORE):
                raise RuntimeError(f"{len(STORE)} weight gradients were left at the end of the step")
            if config.finalize_model_grads_func is not None and not forward_only:
                tokens = self._tokens_of_step(inputs, groups.pp) if config.calculate_per_token_loss else None
                config.finalize_model_grads_func(
                    model, tokens, pg_collection=groups, force_all_reduce=force_all_reduce
                )
            losses = self._losses_on_last_rank(inputs, groups.pp)
        self._training_steps += not forward_only
        return losses

    def _directions(self, group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the process groups, down and up, of the messages in ``group``; the first call makes them."""
        if self._groups is None:
            self._groups = message_groups(dist.get_process_group_ranks(group))
        return self._groups

    def _loss_transfer(self, group: dist.ProcessGroup) -> LossTransfer | None:
        """Return what brings losses to the last rank of ``group``; None if that rank computes them itself."""
        holder = self.pipeline.placement.rank_of(self.pipeline.placement.stages - 1)
        if holder == group.size() - 1:
            return None
        if self._transfer is None:
            self._transfer = LossTransfer(holder, group, self._directions(group)[0], device())
        return self._transfer


def refuse_multimodule(*given: Any) -> None:
    """Raise ValueError for MIMO: stock's schedule carries messages between the pipelines of its modules."""
    if any(type(one).__name__.startswith("MultiModule") for one in given):
        raise ValueError(
            "--pipeline-schedule does not support MIMO, whose modules have pipelines of their own; leave one "
            "of the two out"
        )
