"""A vocabulary that all ranks of a pipeline share in a Megatron model, and its first and last stage."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from megatron_pp_ext.features.vocabulary.megatron.dealing import EmbeddingPart, OutputPart, VocabularyPart
from megatron_pp_ext.features.vocabulary.runtime.exchanges import (
    DummyExchanges,
    Exchanges,
    Rows,
    SharedEmbedding,
)
from megatron_pp_ext.features.vocabulary.runtime.operations import Logits
from megatron_pp_ext.features.vocabulary.runtime.output import (
    ALONE,
    SharedOutput,
    SharedVocabulary,
    TensorRanks,
)
from megatron_pp_ext.megatron.core.data_parallel import DataParallel, add_gradient
from megatron_pp_ext.megatron.runners.flushed import Step
from megatron_pp_ext.megatron.runners.model_stage import (
    ForwardStep,
    ModelStage,
    StepInputs,
    backward_of_stock,
    step_of_one_call,
)
from megatron_pp_ext.megatron.runners.transport import Transport, device
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.setting_error import SettingError, StepError

FLAG = "--pipeline-vocabulary shared"


class ReadAhead:
    """The first stage: reads each batch when its tokens are needed, and keeps it for the forward.

    All ranks need the tokens before the forward.  The script's forward step is called with a model that notes
    its arguments; the forward is that call.
    """

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
            _, loss_function = step_of_one_call(self._inputs.forward_step_func, iterator, model, FLAG)
        finally:
            del model.forward
        ((args, kwargs),) = calls
        (whole,) = unwrap_model([model])
        arguments = inspect.signature(whole.forward).bind(*args, **kwargs).arguments
        self._calls[microbatch] = args, kwargs, loss_function
        return arguments["input_ids"]

    def forward(self, microbatch: int, embedded: torch.Tensor) -> ForwardStep:
        """Return the forward step that goes on with the batch."""
        args, kwargs, loss_function = self._calls.pop(microbatch)

        def step(iterator: Any, model: Any) -> Any:
            self._lookup.given = embedded
            return model(*args, **kwargs), loss_function

        return step


class Head:
    """The last stage: a ``runtime.output.LossHead`` of the script's loss function and stock's arithmetic.

    The loss function is called later than stock calls it, when the loss of every token is known.
    """

    def __init__(self, inputs: StepInputs, output: OutputPart) -> None:
        self._inputs, self._output = inputs, output
        self._loss_functions: dict[int, Any] = {}

    def forward(self, microbatch: int) -> ForwardStep:
        """Return the script's forward step; its loss function is kept for later."""

        def step(iterator: Any, model: Any) -> Any:
            output, loss_function = step_of_one_call(self._inputs.forward_step_func, iterator, model, FLAG)
            self._loss_functions[microbatch] = loss_function
            return output, loss_function

        return step

    def labels(self, microbatch: int) -> torch.Tensor:
        """See ``runtime.output.LossHead``; hidden states are tokens x batch, and so are the labels here."""
        labels, self._output.labels = self._output.labels, None
        if labels is None:
            raise StepError(
                "--pipeline-vocabulary shared needs a forward step that gives its model labels; leave it out"
            )
        self._shape = labels.shape
        return labels.transpose(0, 1).contiguous()

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        inputs, chunk = self._inputs, len(self._inputs.model) - 1
        batch, tokens = self._shape
        token_losses = (
            losses.view(tokens, batch).transpose(0, 1).contiguous().requires_grad_(not inputs.forward_only)
        )
        vp_stage = chunk if chunk else None
        if inputs.config.timers is not None:
            inputs.config.timers("forward-compute", log_level=2).start()  # stock's function stops it
        with torch.set_grad_enabled(not inputs.forward_only):
            loss, tokens_of_loss = stock_schedules.forward_step_calc_loss(
                inputs.model[chunk],
                # A script's loss function may write into what it gets.
                token_losses.clone(),
                self._loss_functions.pop(microbatch),
                inputs.config,
                vp_stage,
                inputs.collect_non_loss_data,
                inputs.microbatches,
                inputs.losses,
                inputs.cp_size,
                True,
            )
        inputs.tokens += tokens_of_loss
        if inputs.forward_only:
            return losses
        gradient: torch.Tensor = backward_of_stock(token_losses, loss, None, inputs.config)
        return gradient.transpose(0, 1).reshape(-1)


class FirstStage(ModelStage):
    """The first stage, whose input is embedded elsewhere; it gives a gradient for it if that ``trains``."""

    def __init__(self, ahead: ReadAhead, trains: bool, *about: Any, **more: Any) -> None:
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


class LastStage(ModelStage):
    """The last stage, whose output is the hidden state, and whose loss comes later."""

    def __init__(self, head: Head, *about: Any, **more: Any) -> None:
        super().__init__(*about, **{**more, "is_last": False})
        self._head = head

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        return self._stock_forward(self._head.forward(microbatch), microbatch, activation)


class ModelVocabulary(SharedVocabulary):
    """The vocabulary of one step, and the two end stages, which work with it (``make_stage``).

    A message has tokens, batch, hidden; under sequence parallelism it has a part of the tokens.
    """

    def __init__(
        self, inputs: StepInputs, placement: Placement, plan: RankPlan, exchanges: Exchanges
    ) -> None:
        _refuse(inputs)
        models = unwrap_model(list(inputs.model))
        lookup, output = models[0].embedding.word_embeddings, models[-1].output_layer
        is_first, is_last = (plan.rank == placement.rank_of(stage) for stage in (0, placement.stages - 1))
        table: VocabularyPart = output if output.is_tied else lookup
        trains = table.weight.requires_grad
        ahead = ReadAhead(inputs, lookup) if is_first else None
        head = Head(inputs, output) if is_last else None
        self._makes: dict[int, Callable[..., ModelStage]] = {}
        if ahead is not None:
            self._makes[0] = functools.partial(FirstStage, ahead, trains)
        if head is not None:
            self._makes[placement.stages - 1] = functools.partial(LastStage, head)
        completing = functools.partial(_completing, inputs.data_parallel)
        embedding_completes = functools.partial(completing, table, -1 if output.is_tied else 0)
        output_completes = nullcontext if output.is_tied else functools.partial(completing, output, -1)
        tensor_ranks = _tensor_ranks(inputs.config)
        tokens, batch, _ = inputs.shape
        super().__init__(
            SharedEmbedding(
                _rows(table),
                torch.Size((batch, tokens * tensor_ranks.parts)),
                device(),
                exchanges,
                placement.rank_of(0),
                ahead.tokens if ahead else None,
                embedding_completes if trains and not inputs.forward_only else nullcontext,
            ),
            SharedOutput(
                _rows(output),
                torch.Size(inputs.shape),
                exchanges,
                placement.rank_of(placement.stages - 1),
                head,
                tensor_ranks,
                inputs.forward_only,
                output_completes,
                sum(action.kind is Kind.T for action in plan.actions),
            ),
        )
        for part, chunk in ((table, 0), (output, len(models) - 1))[output.is_tied :]:
            if part.weight.requires_grad and not inputs.forward_only:
                inputs.data_parallel.expect_part(chunk)

    def make_stage(self, inputs: StepInputs, stage: int, *about: Any, **more: Any) -> ModelStage:
        """Return a stage; that of either end works with the vocabulary."""
        return self._makes.get(stage, ModelStage)(inputs, stage, *about, **more)


@contextmanager
def shared(step: Step) -> Iterator[None]:
    """Surround a step; where ranks share a vocabulary, its end stages work with it."""
    if step.plan.has(Logits):
        exchanges = _exchanges(step.inputs, step.transport)
        vocabulary = ModelVocabulary(step.inputs, step.placement, step.plan, exchanges)
        step.make_stage = vocabulary.make_stage
        step.parts.append(vocabulary)
    yield


def _exchanges(inputs: StepInputs, transport: Transport) -> Exchanges:
    """Return the exchanges of a step; under tensor parallelism more ranks than the pipeline's have rows."""
    pipeline, everyone = transport.groups(
        "vocabulary", inputs.group, parallel_state.get_model_parallel_group()
    )
    if transport.is_alone:
        return DummyExchanges(pipeline, everyone, get_attr_wrapped_model(inputs.model[0], "vocab_size"))
    return Exchanges(pipeline, everyone)


def _refuse(inputs: StepInputs) -> None:
    """Raise ValueError for properties of a step that no flag states and that are not supported."""
    if inputs.collect_non_loss_data:
        raise SettingError(
            "--pipeline-vocabulary shared cannot collect other data than losses from the last stage, "
            "which has no logits; leave it out"
        )
    if not inputs.shape:
        raise SettingError(
            "--pipeline-vocabulary shared needs microbatches of one shape, and the model's config has "
            "variable_seq_lengths; leave one of the two out"
        )
    if inputs.config.enable_autocast:
        raise SettingError(
            "--pipeline-vocabulary shared computes logits outside of the forward step, and the model's "
            "config has enable_autocast, which holds inside; leave one of the two out"
        )


@contextmanager
def _completing(data_parallel: DataParallel, part: VocabularyPart, chunk: int) -> Iterator[None]:
    """Surround the work that completes the gradient of a ``part``, which data parallelism then reduces."""
    with data_parallel.part(chunk):
        yield
        if hasattr(part.weight, "count"):
            part.weight.count()


def _tensor_ranks(config: Any) -> TensorRanks:
    size = config.tensor_model_parallel_size
    if size == 1:
        return ALONE
    group = parallel_state.get_tensor_model_parallel_group()
    return TensorRanks(group, size if config.sequence_parallel else 1)


def _rows(part: VocabularyPart) -> Rows:
    weight = part.weight
    add = functools.partial(add_gradient, weight)
    return Rows(part.first, len(weight), part.rows, add, weight.requires_grad)
