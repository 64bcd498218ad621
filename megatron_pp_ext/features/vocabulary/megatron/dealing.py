"""Cuts the embedding and the output layer of a Megatron model by rows over all ranks of the pipeline.

Megatron builds both whole, on the first and the last stage; under tensor parallelism it builds a part of
each.  Right after that every rank takes its rows of them into its own chunks: those of the embedding into the
first chunk, those of the output layer into the last one, under the names that they have in stock.  A tied
weight exists once, as the output layer's.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features.vocabulary.megatron.parts import EmbeddingPart, OutputPart, tensor_ranks
from megatron_pp_ext.features.vocabulary.options import FrozenOutput
from megatron_pp_ext.integration.core.global_names import EMBEDDING, OUTPUT
from megatron_pp_ext.integration.core.parameter_marks import Marks, half_frozen, marks_of
from megatron_pp_ext.integration.requested import Pipeline


def deal_out(chunks: Sequence[Any], pipeline: Pipeline) -> None:
    """Replace embedding and output layer of this rank's ``chunks`` by its parts."""
    placement = pipeline.placement
    stages = placement.stages_of(parallel_state.get_pipeline_model_parallel_group().rank())
    last = placement.stages - 1
    is_tied = chunks[0].share_embeddings_and_output_weights
    for chunk in chunks:
        # There is one copy of a tied weight now: no gradients to exchange, and no copy to save.
        chunk.share_embeddings_and_output_weights = False
    embedding = _replace_embedding(chunks[0], is_first=stages[0] == 0)
    output = _replace_output(chunks[-1], is_last=stages[-1] == last)
    first_home, last_home = placement.rank_of(0), placement.rank_of(last)
    of_embedding, of_output = _marks(pipeline, (embedding, first_home), (output, last_home))
    if is_tied and of_embedding.requires_grad is not of_output.requires_grad:
        raise SystemExit(f"megatron_pp_ext: {half_frozen(EMBEDDING, 'frozen at one end of the model')}")
    table = _broadcast(embedding, first_home, chunks[0])
    if is_tied:
        chunks[-1].output_layer.hold(table, of_embedding, EMBEDDING)
        chunks[-1].output_layer.is_tied = True
    else:
        chunks[0].embedding.word_embeddings.hold(table, of_embedding, EMBEDDING)
        chunks[-1].output_layer.hold(_broadcast(output, last_home, chunks[0]), of_output, OUTPUT)


def _replace_embedding(model: Any, is_first: bool) -> torch.nn.Parameter | None:
    """Put a part in the place of the embedding, and return the embedding's weight where there is one."""
    part = EmbeddingPart()
    if not is_first:
        model.embedding = MegatronModule(model.config)
        model.embedding.word_embeddings = part
        return None
    replaced = model.embedding.word_embeddings
    weight = _weight_alone(replaced, VocabParallelEmbedding, "embedding")
    part.scatters = replaced.reduce_scatter_embeddings
    model.embedding.word_embeddings = part
    return weight


def _replace_output(model: Any, is_last: bool) -> torch.nn.Parameter | None:
    """Put a part in the place of the output layer, and return the layer's weight where there is one."""
    part = OutputPart()
    weight = None
    if is_last:
        replaced = getattr(model, "output_layer", None)
        weight = _weight_alone(replaced, ColumnParallelLinear, "output layer")
        if model.config.cross_entropy_loss_fusion and model.config.cross_entropy_fusion_impl == "linear":
            _refuse("output layer", "is one kernel with the loss (cross_entropy_fusion_impl linear)")
        model.compute_language_model_loss = part.keep_labels
    model.output_layer = part
    return weight


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _weight_alone(module: Any, kind: type[torch.nn.Module], what: str) -> torch.nn.Parameter:
    """Return the weight of the ``module`` to replace; ends the process if that does more than its kind."""
    problem = None
    if not isinstance(module, kind):
        problem = f"is a {type(module).__name__}, no {kind.__name__}"
    elif others := [name for name, _ in module.named_parameters() if name != "weight"]:
        problem = f"has {', '.join(others)} in addition to its weight"
    elif any(getattr(module, hooks) for hooks in _HOOKS):
        problem = "has hooks"
    else:
        weight = module.get_parameter("weight")
        try:
            marks_of(weight)
        except ValueError as error:
            problem = f"has a weight that {error}"
    if problem:
        _refuse(what, problem)
    return weight


def _refuse(what: str, problem: str) -> NoReturn:
    raise SystemExit(
        "megatron_pp_ext: --pipeline-vocabulary shared cuts embedding and output layer by rows, and the "
        f"model's {what} {problem}; leave it out"
    )


_STOCK_MARKS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "is_embedding_or_output_parameter": True,
}
"""What Megatron writes on both weights."""


def _marks(pipeline: Pipeline, *ends: tuple[torch.nn.Parameter | None, int]) -> list[Marks]:
    """Return, on all ranks of the pipeline, what each weight carries on the rank of it that has the weight.

    A rank that rehearses alone cannot know, and all have to rehearse one schedule: there nothing is frozen.
    """
    if pipeline.rehearsal is not None:
        return [Marks(True, _STOCK_MARKS) for _ in ends]
    group = parallel_state.get_pipeline_model_parallel_group()
    own = [None if weight is None else marks_of(weight) for weight, _ in ends]
    of_all = [own] * group.size()
    dist.all_gather_object(of_all, own, group=group)
    found = [of_all[home][number] for number, (_, home) in enumerate(ends)]
    return [marks for marks in found if marks is not None]


def _broadcast(weight: torch.Tensor | None, holder: int, chunk: Any) -> torch.Tensor:
    """Return, on all ranks of the pipeline, the weight that rank ``holder`` of it has.

    Every ``chunk`` of the model knows its rows, columns and dtype.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    device = torch.device("cuda", torch.cuda.current_device())
    if weight is None:
        rows = chunk.vocab_size // tensor_ranks().size()
        whole = torch.empty(rows, chunk.config.hidden_size, dtype=chunk.config.params_dtype, device=device)
    else:
        whole = weight.detach().to(device)
    dist.broadcast(whole, dist.get_global_rank(group, holder), group=group)
    return whole


def frozen_output(model: Sequence[Any]) -> FrozenOutput | None:
    """Return the option for chunks that have a part of a frozen output layer, None for others."""
    layer = getattr(unwrap_model(list(model))[-1], "output_layer", None)
    return FrozenOutput() if isinstance(layer, OutputPart) and not layer.weight.requires_grad else None
