"""The vocabulary that all ranks of a pipeline share, at work in a Megatron model.

The first stage's embedding and the last stage's output layer were replaced by parts (``vocabulary_parts``).
What stock does in one forward is done here in two pieces.

* The batch of a microbatch is read ahead of its forward, because all ranks need the tokens.  The script's
  forward step is called with a model that notes what it is called with; the forward is that call.
* The loss function of the last stage is called later, when the loss of every token is known.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.utils import unwrap_model

from megatron_pp_ext.integration.core.data_parallel import add_gradient
from megatron_pp_ext.integration.core.vocabulary_parts import EmbeddingPart, OutputPart, VocabularyPart
from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import ForwardStep, StepInputs
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.shared_embedding import SharedEmbedding
from megatron_pp_ext.runtime.shared_output import ALONE, SharedOutput, TensorRanks
from megatron_pp_ext.runtime.shared_vocabulary import SharedVocabulary
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges
from megatron_pp_ext.runtime.vocabulary_rows import Rows
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement


class ModelVocabulary(SharedVocabulary):
    """The vocabulary of one step, and what the two end stages need of it (``model_stage.Ends``).

    ``shape`` is that of a message: tokens, batch, hidden; under sequence parallelism it has a part of the
    tokens.
    """

    def __init__(
        self,
        inputs: StepInputs,
        placement: Placement,
        plan: RankPlan,
        exchanges: Exchanges,
        shape: Any,
    ) -> None:
        if inputs.collect_non_loss_data:
            raise ValueError(
                "--pipeline-vocabulary shared cannot collect other data than losses from the last stage, "
                "which has no logits; leave it out"
            )
        if not shape:
            raise ValueError(
                "--pipeline-vocabulary shared needs microbatches of one shape, and the model's config has "
                "variable_seq_lengths; leave one of the two out"
            )
        if inputs.config.enable_autocast:
            raise ValueError(
                "--pipeline-vocabulary shared computes logits outside of the forward step, and the model's "
                "config has enable_autocast, which holds inside; leave one of the two out"
            )
        models = unwrap_model(list(inputs.model))
        lookup, scorer = models[0].embedding.word_embeddings, models[-1].output_layer
        is_first, is_last = (plan.rank == placement.rank_of(stage) for stage in (0, placement.stages - 1))
        self._is_tied = scorer.is_tied
        self._table: VocabularyPart = scorer if self._is_tied else lookup
        self._scorer: OutputPart = scorer
        self._inputs = inputs
        self._gradients_left = sum(step.action.kind is Kind.T for step in plan.steps)
        self._ahead = _ReadAhead(inputs, lookup) if is_first else None
        self._head = _Head(inputs, scorer) if is_last else None
        tensor_ranks = _tensor_ranks(inputs.config)
        tokens, batch, _ = shape
        super().__init__(
            SharedEmbedding(
                _rows(self._table),
                torch.Size((batch, tokens * tensor_ranks.parts)),
                device(),
                exchanges,
                placement.rank_of(0),
                self._ahead.tokens if self._ahead else None,
            ),
            SharedOutput(
                _rows(scorer),
                torch.Size(shape),
                exchanges,
                placement.rank_of(placement.stages - 1),
                self._head,
                tensor_ranks,
                inputs.forward_only,
            ),
        )
        parts = [(self._table, 0)] if not self._is_tied else []
        for part, chunk in (*parts, (scorer, len(models) - 1)):
            if part.weight.requires_grad and not inputs.forward_only:
                inputs.data_parallel.expect_part(chunk)

    @property
    def trains_embedding(self) -> bool:
        """See ``model_stage.Ends``."""
        trains: bool = self._table.weight.requires_grad
        return trains

    def first_forward(self, microbatch: int, embedded: torch.Tensor) -> ForwardStep:
        """See ``model_stage.Ends``."""
        assert self._ahead is not None
        return self._ahead.forward(microbatch, embedded)

    def last_forward(self, microbatch: int) -> ForwardStep:
        """See ``model_stage.Ends``."""
        assert self._head is not None
        return self._head.forward(microbatch)

    def weight_gradient(self, microbatch: int) -> None:
        """See ``executor.Vocabulary``; the last one completes the gradient of an untied output weight."""
        self._gradients_left -= 1
        ends = not self._gradients_left and not self._is_tied
        with self._completing(self._scorer, -1) if ends else nullcontext():
            super().weight_gradient(microbatch)

    def close(self) -> None:
        """See ``executor.Vocabulary``; the gradient of the embedding is complete here."""
        complete = self.trains_embedding and not self._inputs.forward_only
        with self._completing(self._table, -1 if self._is_tied else 0) if complete else nullcontext():
            super().close()

    @contextmanager
    def _completing(self, part: VocabularyPart, chunk: int) -> Iterator[None]:
        with self._inputs.data_parallel.part(chunk):
            yield
            if hasattr(part.weight, "count"):
                part.weight.count()


def has_frozen_output(model: Sequence[Any]) -> bool:
    """Return whether the chunks of ``model`` share an output layer whose weight is frozen."""
    scorer = getattr(unwrap_model(list(model))[-1], "output_layer", None)
    return isinstance(scorer, OutputPart) and not scorer.weight.requires_grad


class _ReadAhead:
    """The first stage: reads each batch when its tokens are needed, and keeps it for the forward."""

    def __init__(self, inputs: StepInputs, lookup: EmbeddingPart) -> None:
        self._inputs, self._lookup = inputs, lookup
        self._calls: dict[int, tuple[Any, Any, Any]] = {}

    def tokens(self, microbatch: int) -> torch.Tensor:
        """Read the batch of ``microbatch``, the next one, and return its tokens, batch x tokens."""
        (model, *_), (iterator, *_) = self._inputs.model, self._inputs.iterators
        calls: list[tuple[Any, Any]] = []

        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append((args, kwargs))
            return torch.empty(0)

        # A model's own attribute comes before its class's method, and scripts see the model they know.
        model.forward = note
        try:
            _, loss_function = self._inputs.forward_step_func(iterator, model)
        finally:
            del model.forward
        if len(calls) != 1:
            raise RuntimeError(
                f"--pipeline-vocabulary shared needs a forward step that calls its model once, and this one "
                f"called it {len(calls)} times; leave it out"
            )
        ((args, kwargs),) = calls
        (whole,) = unwrap_model([model])
        named = inspect.signature(whole.forward).bind(*args, **kwargs).arguments
        self._calls[microbatch] = args, kwargs, loss_function
        tokens: torch.Tensor = named["input_ids"]
        return tokens

    def forward(self, microbatch: int, embedded: torch.Tensor) -> ForwardStep:
        """Return the forward step that goes on with the batch."""
        args, kwargs, loss_function = self._calls.pop(microbatch)

        def step(iterator: Any, model: Any) -> Any:
            self._lookup.given = embedded
            return model(*args, **kwargs), loss_function

        return step


class _Head:
    """The last stage: ``shared_output.Head`` by the script's loss function and stock's own arithmetic."""

    def __init__(self, inputs: StepInputs, scorer: OutputPart) -> None:
        self._inputs, self._scorer = inputs, scorer
        self._loss_functions: dict[int, Any] = {}

    def forward(self, microbatch: int) -> ForwardStep:
        """Return the script's forward step; its loss function is kept for later."""

        def step(iterator: Any, model: Any) -> Any:
            output, loss_function = self._inputs.forward_step_func(iterator, model)
            self._loss_functions[microbatch] = loss_function
            return output, loss_function

        return step

    def labels(self, microbatch: int) -> torch.Tensor:
        """See ``shared_output.Head``; hidden states are tokens x batch, and so are the labels here."""
        labels, self._scorer.labels = self._scorer.labels, None
        if labels is None:
            raise RuntimeError(
                "--pipeline-vocabulary shared needs a forward step that gives its model labels; leave it out"
            )
        self._shape = labels.shape
        return labels.transpose(0, 1).contiguous()

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        """See ``shared_output.Head``."""
        inputs, chunk = self._inputs, len(self._inputs.model) - 1
        batch, tokens = self._shape
        each = losses.view(tokens, batch).transpose(0, 1).contiguous().requires_grad_(not inputs.forward_only)
        vp_stage = chunk if chunk else None
        if inputs.config.timers is not None:
            inputs.config.timers("forward-compute", log_level=2).start()  # stock's function stops it
        with torch.set_grad_enabled(not inputs.forward_only):
            loss, counted = stock_schedules.forward_step_calc_loss(
                inputs.model[chunk],
                # A script's loss function may write into what it gets.
                each.clone(),
                self._loss_functions.pop(microbatch),
                inputs.config,
                vp_stage,
                inputs.collect_non_loss_data,
                inputs.microbatches,
                inputs.losses,
                inputs.cp_size,
                True,
            )
        inputs.tokens += counted
        if inputs.forward_only:
            return losses
        gradient: torch.Tensor = stock_schedules.backward_step(each, loss, None, inputs.config)
        return gradient.transpose(0, 1).reshape(-1)


class _TensorParallel(TensorRanks):
    """Every rank of the tensor-parallel group has the hidden states of all tokens."""

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        return gradient


class _SequenceParallel(TensorRanks):
    """Every rank of the tensor-parallel group has the hidden states of some tokens, in the ranks' order."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        whole = hidden.new_empty(hidden.shape[0] * self.parts, *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden, group=parallel_state.get_tensor_model_parallel_group())
        return whole

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        mine = gradient.new_empty(gradient.shape[0] // self.parts, gradient.shape[1])
        dist.reduce_scatter_tensor(mine, gradient, group=parallel_state.get_tensor_model_parallel_group())
        return mine


def _tensor_ranks(config: Any) -> TensorRanks:
    size = config.tensor_model_parallel_size
    if size == 1:
        return ALONE
    return _SequenceParallel(size) if config.sequence_parallel else _TensorParallel()


def _rows(part: VocabularyPart) -> Rows:
    weight = part.weight
    add = functools.partial(add_gradient, weight)
    return Rows(part.first, len(weight), part.rows, add, weight.requires_grad)
