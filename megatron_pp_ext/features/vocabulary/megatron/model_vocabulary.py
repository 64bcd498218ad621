"""The vocabulary that all ranks of a pipeline share, at work in a Megatron model.

The first stage's embedding and the last stage's output layer were replaced by parts (``vocabulary_parts``).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from megatron_pp_ext.features.vocabulary.megatron.first_and_last_stage import (
    FirstStage,
    Head,
    LastStage,
    ReadAhead,
)
from megatron_pp_ext.features.vocabulary.megatron.parts import VocabularyPart
from megatron_pp_ext.features.vocabulary.runtime.dummy_exchanges import DummyExchanges
from megatron_pp_ext.features.vocabulary.runtime.embedding import SharedEmbedding
from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges
from megatron_pp_ext.features.vocabulary.runtime.operations import Logits
from megatron_pp_ext.features.vocabulary.runtime.output import ALONE, SharedOutput, TensorRanks
from megatron_pp_ext.features.vocabulary.runtime.part import SharedVocabulary
from megatron_pp_ext.features.vocabulary.runtime.rows import Rows
from megatron_pp_ext.integration.core.data_parallel import DataParallel, add_gradient
from megatron_pp_ext.integration.runners.message_groups import device
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step
from megatron_pp_ext.integration.runners.transport import Transport
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.placement import Placement


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
    """Raise ValueError for what a step may have that no flag states."""
    if inputs.collect_non_loss_data:
        raise ValueError(
            "--pipeline-vocabulary shared cannot collect other data than losses from the last stage, "
            "which has no logits; leave it out"
        )
    if not inputs.shape:
        raise ValueError(
            "--pipeline-vocabulary shared needs microbatches of one shape, and the model's config has "
            "variable_seq_lengths; leave one of the two out"
        )
    if inputs.config.enable_autocast:
        raise ValueError(
            "--pipeline-vocabulary shared computes logits outside of the forward step, and the model's "
            "config has enable_autocast, which holds inside; leave one of the two out"
        )


@contextmanager
def _completing(data_parallel: DataParallel, part: VocabularyPart, chunk: int) -> Iterator[None]:
    """Surround what completes the gradient of a ``part``, which data parallelism reduces then."""
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
