"""Megatron's forward-backward contract, which all runners keep."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_pp_ext.job.rules.all_rules import refuse_config
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import local_linear, optimizer
from megatron_pp_ext.megatron.core.data_parallel import DataParallel
from megatron_pp_ext.megatron.core.parameters import require_alike
from megatron_pp_ext.megatron.runners.model_stage import StepInputs, stop_timers, timed
from megatron_pp_ext.runtime.rank import Recorder, Unrecorded, print_rank_0
from megatron_pp_ext.runtime.split import STORE


def begin_step(config: Any, forward_only: bool) -> None:
    """Announce a step to the pages, as stock's schedules do; an evaluation runs without pages.

    In the first training step Megatron records the order in which each rank's layers go forward and backward;
    from the second step on it brings pages back just before they are needed (transformer/moe/paged_stash.py).
    Any order works, as long as all steps have the same.
    """
    if getattr(config, "moe_paged_stash", False):
        from megatron.core.transformer.moe.paged_stash import paged_stash_reset

        paged_stash_reset(enabled=not forward_only, config=config)


def end_step(config: Any, forward_only: bool) -> None:
    """Capture the graphs that the first training step has noted, as stock's schedules do when they end.

    Megatron does nothing where there are none, or all are captured.
    """
    if getattr(config, "cuda_graph_impl", None) == "local" and not forward_only:
        stock_schedules.create_cudagraphs()


class Steps(Protocol):
    """Runs the actions of a step: of a training step, or of an evaluation if ``inputs.forward_only``."""

    def run(self, inputs: StepInputs, recorder: Recorder) -> None:
        """Run every action that this rank has in the step.

        On return the losses and tokens of this rank's stages are in ``inputs``, and ``runtime.split.STORE``
        holds no weight gradient.
        """


class Recording(Protocol):
    """Records steps, for whoever wants to know."""

    def step(self, inputs: StepInputs) -> AbstractContextManager[Recorder | None]:
        """Return a context around the whole step that yields the recorder of its actions, or None."""

    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> AbstractContextManager[None]:
        """Return a context around the actions alone; ``recorder`` is the step's."""


class Unobserved:
    """A ``Recording`` of nothing."""

    def step(self, inputs: StepInputs) -> AbstractContextManager[Recorder | None]:
        return nullcontext()

    def actions(self, inputs: StepInputs, recorder: Recorder | None) -> AbstractContextManager[None]:
        return nullcontext()


class Losses(Protocol):
    """Brings what the stages add to the loss store to where Megatron looks for it."""

    def tokens(self, inputs: StepInputs) -> torch.Tensor:
        """Return the step's count of tokens, which the last rank of the pipeline must have.

        Called before gradients are finalized, only under --calculate-per-token-loss.
        """

    def losses(self, inputs: StepInputs) -> list[Any]:
        """Return the loss store on the last rank of the pipeline; other ranks may return an empty list.

        Called last: the last rank's host waits for the losses, so all else that it launches in this step
        has to come before.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """The arguments of Megatron's forward-backward functions; ``p2p_communicator`` is not used."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: ProcessGroupCollection | None = None
    force_all_reduce: bool | None = False

    @property
    def chunks(self) -> list[Any]:
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def iterators(self) -> list[Any]:
        return self.data_iterator if isinstance(self.data_iterator, list) else [self.data_iterator]

    def require_supported(self) -> None:
        """Raise ValueError for what no schedule supports, and unless each chunk has a data iterator."""
        if self.adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "schedules of megatron_pp_ext do not support modelopt's distillation, which adjusts shapes "
                "of messages (adjust_tensor_shapes_fn); leave it out, or train under Megatron's own schedule"
            )
        refuse_multimodule(self.p2p_communicator, self.pg_collection)
        if len(self.iterators) != len(self.chunks):
            is_list = isinstance(self.data_iterator, list)
            kind = f"a list of {len(self.iterators)}" if is_list else "one iterator"
            raise ValueError(
                f"data_iterator is {kind}, and this model has {len(self.chunks)} chunks on a rank; give a "
                "list of one iterator for each chunk"
            )

    def inputs(self, config: Any, training_steps: int) -> StepInputs:
        """Return the inputs of the step, under the model's ``config`` and after so many training steps."""
        groups = self.pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        (shape,) = stock_schedules.get_tensor_shapes(
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        if config.mtp_standalone or config.variable_seq_lengths:
            # After the prediction a message holds the hidden states of several tokens.  Before 0.17 the
            # function does not know that lengths vary.
            shape = ()
        chunks = self.chunks
        return StepInputs(
            forward_step_func=self.forward_step_func,
            group=groups.pp,
            groups=groups,
            shape=shape,
            model=chunks,
            iterators=self.iterators,
            microbatches=self.num_microbatches,
            config=config,
            cp_size=groups.cp.size(),
            data_parallel=DataParallel(chunks, config, self.forward_only, bool(self.force_all_reduce)),
            forward_only=self.forward_only,
            collect_non_loss_data=self.collect_non_loss_data,
            first_val_step=self.first_val_step,
            training_steps=training_steps,
            samples=self.micro_batch_size,
        )


class PipelineRunner:
    """Runs training and evaluation steps of one pipeline, by its parts.

    Called with what Megatron passes to its own forward-backward functions (keywords only).  All ranks of the
    job call the parts in the same steps and in the same order, so each of them may communicate, as long as it
    does so on every rank.

    ``get_forward_backward_func`` returns a function that runs all microbatches of a training or evaluation
    step, and a runner is such a function.  It does what stock does around the microbatches: timers, gradient
    finalization, the loss store on the last rank.  What it runs and how is that of its parts.
    """

    def __init__(self, steps: Steps, recording: Recording, losses: Losses) -> None:
        self.steps, self._recording, self._losses = steps, recording, losses
        self._training_steps = 0
        self._is_split = False
        self.delivers_losses = True
        """Whether a step brings its losses to where Megatron looks for them; else ``deliver`` does."""
        self._undelivered: dict[bool, StepInputs] = {}

    def deliver(self, forward_only: bool) -> list[Any]:
        """Bring the losses of the last such step, which may be those of its graph, to the last rank."""
        return self._losses.losses(self._undelivered[forward_only])

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run a step of ``StepCall``'s ``arguments``: forwards, and backwards unless ``forward_only``.

        Returns the loss store, one entry a microbatch, on the last pipeline rank, where Megatron looks for
        it, and an empty list elsewhere.

        ValueError, before any message, for what no schedule supports: distillation, MIMO, some settings of
        the model's config; and unless there is one data iterator for each chunk.
        """
        call = StepCall(**arguments)
        inputs = self._prepare(call)
        config = inputs.config
        clock = timed(config, "forward-backward", level=1, barrier=config.barrier_with_L1_time)
        with clock, self._recording.step(inputs) as recorder, optimizer.put_off():
            self._run(inputs, recorder)
            losses = self._hand_back(inputs, call.force_all_reduce)
        end_step(config, inputs.forward_only)
        self._training_steps += not inputs.forward_only
        return losses

    def _prepare(self, call: StepCall) -> StepInputs:
        """Return the inputs of the step, before any message; the first one readies the model's layers."""
        call.require_supported()
        config = get_model_config(call.chunks[0])
        refuse_config(config)
        if not self._is_split:
            require_alike(call.chunks)
            _split_backwards(call.chunks, config)
            self._is_split = True
        inputs = call.inputs(config, self._training_steps)
        begin_step(config, call.forward_only)
        return inputs

    def _run(self, inputs: StepInputs, recorder: Recorder | None) -> None:
        """Run all actions of the step; RuntimeError where one left a weight gradient unfinished."""
        with inputs.data_parallel.step(), self._recording.actions(inputs, recorder):
            try:
                self.steps.run(inputs, recorder or Unrecorded())
            except BaseException:
                STORE.abandon()
                stop_timers(inputs.config)
                raise
        if len(STORE):
            raise RuntimeError(f"{len(STORE)} weight gradients were left at the end of the step")

    def _hand_back(self, inputs: StepInputs, force_all_reduce: bool | None) -> list[Any]:
        """Let Megatron finalize the gradients, and return the losses, unless ``deliver`` brings them."""
        config = inputs.config
        if config.finalize_model_grads_func is not None and not inputs.forward_only:
            tokens = self._losses.tokens(inputs) if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(
                inputs.model, tokens, pg_collection=inputs.groups, force_all_reduce=force_all_reduce
            )
        if self.delivers_losses:
            return self._losses.losses(inputs)
        self._undelivered[inputs.forward_only] = inputs
        return inputs.losses


def _split_backwards(model: list[Any], config: Any) -> None:
    """Prepare the layers of ``model`` for backwards in two halves, and print what that changes for them."""
    local_linear.note_row_layers(model)
    pipeline = requested.pipeline()
    is_split = pipeline is not None and pipeline.request.may_split_backward
    if any(hasattr(module, "wgrad_store") for chunk in model for module in chunk.modules()):
        from megatron_pp_ext.megatron.core import engine_linear

        engine_linear.split_backwards(model)
        if is_split and engine_linear.without_bulk_overlap(model):
            print_rank_0(
                "megatron_pp_ext: bulk overlaps of tp_comm_overlap are off, since their two products are "
                "apart"
            )
    if is_split and getattr(config, "use_transformer_engine_op_fuser", False):
        print_rank_0(
            "megatron_pp_ext: MLPs of Transformer Engine's op fuser keep whole backwards; other layers split "
            "theirs"
        )


def refuse_multimodule(*values: Any) -> None:
    """Raise ValueError for MIMO: stock's schedule carries messages between the pipelines of its modules."""
    if any(type(value).__name__.startswith("MultiModule") for value in values):
        raise ValueError(
            "schedules of megatron_pp_ext do not support MIMO, whose modules have pipelines of their own; "
            "train it under Megatron's own schedule"
        )
