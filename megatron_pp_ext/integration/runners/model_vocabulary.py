"""The vocabulary that all ranks of a pipeline share, at work in a Megatron model.

The first stage's embedding and the last stage's output layer were replaced by parts (``vocabulary_parts``).
What stock does in one forward is done here in two pieces.

* The batch of a microbatch is read ahead of its forward, because all ranks need the tokens.  The script's
  forward step is called with a model that notes what it is called with; the forward is that call.
* The loss function of the last stage is called later, when the loss of every token is known.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.utils import unwrap_model

from megatron_pp_ext.integration.core.data_parallel import DataParallel, add_gradient
from megatron_pp_ext.integration.core.vocabulary_parts import EmbeddingPart, OutputPart, VocabularyPart
from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import ForwardStep, ModelStage, StepInputs
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.shared_embedding import SharedEmbedding
from megatron_pp_ext.runtime.shared_output import ALONE, SharedOutput, TensorRanks
from megatron_pp_ext.runtime.shared_vocabulary import SharedVocabulary
from megatron_pp_ext.runtime.vocabulary_exchanges import Exchanges
from megatron_pp_ext.runtime.vocabulary_rows import Rows
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement


class ModelVocabulary(SharedVocabulary):
    """The vocabulary of one step, and the two end stages, which work with it (``make_stage``).

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
        table: VocabularyPart = scorer if scorer.is_tied else lookup
        trains = table.weight.requires_grad
        ahead = _ReadAhead(inputs, lookup) if is_first else None
        head = _Head(inputs, scorer) if is_last else None
        self._makes: dict[int, Callable[..., ModelStage]] = {}
        if ahead is not None:
            self._makes[0] = functools.partial(_FirstStage, ahead, trains)
        if head is not None:
            self._makes[placement.stages - 1] = functools.partial(_LastStage, head)
        completing = functools.partial(_completing, inputs.data_parallel)
        embedding_completes = functools.partial(completing, table, -1 if scorer.is_tied else 0)
        output_completes = nullcontext if scorer.is_tied else functools.partial(completing, scorer, -1)
        tensor_ranks = _tensor_ranks(inputs.config)
        tokens, batch, _ = shape
        super().__init__(
            _Embedding(
                embedding_completes if trains and not inputs.forward_only else nullcontext,
                _rows(table),
                torch.Size((batch, tokens * tensor_ranks.parts)),
                device(),
                exchanges,
                placement.rank_of(0),
                ahead.tokens if ahead else None,
            ),
            _Output(
                output_completes,
                sum(action.kind is Kind.T for action in plan.actions),
                _rows(scorer),
                torch.Size(shape),
                exchanges,
                placement.rank_of(placement.stages - 1),
                head,
                tensor_ranks,
                inputs.forward_only,
            ),
        )
        for part, chunk in ((table, 0), (scorer, len(models) - 1))[scorer.is_tied :]:
            if part.weight.requires_grad and not inputs.forward_only:
                inputs.data_parallel.expect_part(chunk)

    def make_stage(self, inputs: StepInputs, stage: int, *about: Any, **more: Any) -> ModelStage:
        """Return a stage; that of either end works with the vocabulary."""
        return self._makes.get(stage, ModelStage)(inputs, stage, *about, **more)


@contextmanager
def _completing(data_parallel: DataParallel, part: VocabularyPart, chunk: int) -> Iterator[None]:
    """Surround what completes the gradient of a ``part``, which data parallelism reduces then."""
    with data_parallel.part(chunk):
        yield
        if hasattr(part.weight, "count"):
            part.weight.count()


Completing = Callable[[], AbstractContextManager[None]]
"""Makes the context of what completes a gradient; ``nullcontext`` where nothing does."""


class _Embedding(SharedEmbedding):
    """An embedding whose gradient is complete at the end of the step, if it has one."""

    def __init__(self, completing: Completing, *about: Any) -> None:
        super().__init__(*about)
        self._completing = completing

    def close(self) -> None:
        """See ``SharedEmbedding``."""
        with self._completing():
            super().close()


class _Output(SharedOutput):
    """An output layer whose last weight gradient of the step, of ``count``, completes an untied weight's."""

    def __init__(self, completing: Completing, count: int, *about: Any) -> None:
        super().__init__(*about)
        self._completing = completing
        self._gradients_left = count

    def weight_gradient(self, microbatch: int) -> None:
        """See ``SharedOutput``."""
        self._gradients_left -= 1
        with nullcontext() if self._gradients_left else self._completing():
            super().weight_gradient(microbatch)


class _FirstStage(ModelStage):
    """The first stage, whose input is embedded elsewhere; it gives a gradient for it if that ``trains``."""

    def __init__(self, ahead: "_ReadAhead", trains: bool, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._ahead, self._trains = ahead, trains

    @property
    def _gives_gradient(self) -> bool:
        return self._trains

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        assert activation is not None
        # A first stage with an input would take its first dimension for the length of the sequence.
        return self._stock_forward(self._ahead.forward(microbatch, activation), microbatch, None)


class _LastStage(ModelStage):
    """The last stage, whose output is the hidden state, and whose loss comes later."""

    def __init__(self, head: "_Head", *about: Any, **more: Any) -> None:
        super().__init__(*about, **{**more, "is_last": False})
        self._head = head

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        return self._stock_forward(self._head.forward(microbatch), microbatch, activation)


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
