"""The rows of embedding and output layer that each rank of a pipeline holds, cut from a Megatron model."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import MakeViewlessTensor, unwrap_model

from megatron_pp_ext.features.vocabulary.options import FrozenOutput
from megatron_pp_ext.megatron.core.parameters import EMBEDDING, OUTPUT, Marks, half_frozen, marked, marks_of
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.setting_error import SettingExit

_ALIGNED = 64
"""Rows to which parts are rounded where that is possible, since products of other shapes are slower."""


class VocabularyPart(torch.nn.Module):
    """A rank's rows of the embedding or of the output weight, or a stand-in where it has none.

    Before a module's forward Megatron's data parallelism gathers the weights that an optimizer on another
    rank has updated.  That is why ``rows`` calls this module, without an argument.
    """

    weight: Any
    first = total = 0
    key = ""
    is_tied = False
    """Whether these are rows of the embedding that serve as the output weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def hold(self, whole: torch.Tensor, marks: Marks, key: str) -> None:
        """Take this rank's rows of ``whole``, the weight of its tensor-parallel rank.

        The rows carry the weight's ``marks``; ``key`` is its name in checkpoints.
        """
        pipeline, tensor = parallel_state.get_pipeline_model_parallel_group(), tensor_ranks()
        begin, end = (row_of(len(whole), pipeline.rank() + past, pipeline.size()) for past in (0, 1))
        self.key, self.total = key, tensor.size() * len(whole)
        self.first = tensor.rank() * len(whole) + begin
        self.weight = marked(whole[begin:end].clone(), marks)
        self.weight.rows_of_whole = self.first, self.total

    def rows(self) -> torch.Tensor:
        """Return the weight, up to date."""
        self()
        return self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Describe the rows as a part of the whole weight, as Megatron's checkpoints need it."""
        if self.weight is None:
            return {}
        replicas = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(
            with_context_parallel=True
        )
        rows, hidden = self.weight.shape
        return {
            f"{prefix}weight": ShardedTensor(
                key=self.key,
                data=self.weight,
                dtype=self.weight.dtype,
                local_shape=(rows, hidden),
                global_shape=(self.total, hidden),
                global_offset=(self.first, 0),
                axis_fragmentations=None,  # parts may differ by some rows
                replica_id=(0, 0, replicas.rank()),
                allow_shape_mismatch=True,  # the padding of a vocabulary goes by the number of ranks
            )
        }


class EmbeddingPart(VocabularyPart):
    """The stand-in for the embedding on the first stage, which returns the rows that all ranks looked up.

    ``given``, batch x tokens x hidden, is set before each forward.  Tensor parallelism adds up, or deals out,
    as in ``VocabParallelEmbedding``.
    """

    given: torch.Tensor | None = None
    scatters = False

    def forward(self, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the embedded ``tokens``, as the module does that this one replaces."""
        if tokens is None:
            return None
        embedded, self.given = self.given, None
        if embedded is None or embedded.shape[:2] != tokens.shape:
            raise RuntimeError("a shared embedding was asked for other tokens than those of its microbatch")
        if self.scatters:
            return reduce_scatter_to_sequence_parallel_region(
                embedded.transpose(0, 1).contiguous(), group=tensor_ranks()
            )
        return reduce_from_tensor_model_parallel_region(embedded, group=tensor_ranks())


class OutputPart(VocabularyPart):
    """Stands, on the last stage, for the output layer and its loss: hands on the hidden state.

    ``labels``, batch x tokens, are the last forward's.
    """

    labels: torch.Tensor | None = None
    sequence_parallel = False
    """Megatron's branch core_dev_r0.16.0 asks its output layer for it."""

    def forward(
        self, input_: torch.Tensor | None = None, **unused: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the hidden state, by Megatron's name for it, where logits were, and no bias.

        It is returned in another tensor with the same memory: a stage's output is emptied once it is sent,
        which must not touch what the layer before has kept of it.
        """
        if input_ is None:
            return None, None
        return MakeViewlessTensor.apply(input_, input_.requires_grad), None

    def keep_labels(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Stand for ``compute_language_model_loss``: the loss is computed when all ranks have their part."""
        self.labels = labels
        return hidden


def row_of(rows: int, rank: int, ranks: int) -> int:
    """Return the first of ``rows`` that ``rank`` has; ``rank == ranks`` gives their end."""
    aligned = math.gcd(rows, _ALIGNED)
    blocks = rows // aligned
    if blocks < 8 * ranks:
        aligned, blocks = 1, rows
    return aligned * (blocks * rank // ranks)


def tensor_ranks() -> dist.ProcessGroup:
    """Return the ranks of tensor parallelism, each of which has other rows."""
    return parallel_state.get_tensor_model_parallel_group()


def deal_out(chunks: Sequence[Any], pipeline: Pipeline) -> None:
    """Replace embedding and output layer of this rank's ``chunks`` by its parts.

    Megatron builds both whole, on the first and the last stage; under tensor parallelism it builds a part of
    each.  Right after that every rank takes its rows of them into its own chunks: those of the embedding into
    the first chunk, those of the output layer into the last one, under the names that they have in stock.  A
    tied weight exists once, as the output layer's.
    """
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


def _weight_alone(module: Any, kind: type[torch.nn.Module], module_name: str) -> torch.nn.Parameter:
    """Return the weight of the ``module`` to replace; ends the process if that does more than its kind."""
    problem = None
    if not isinstance(module, kind):
        problem = f"is a {type(module).__name__}, no {kind.__name__}"
    elif more := [name for name, _ in module.named_parameters() if name != "weight"]:
        problem = f"has {', '.join(more)} in addition to its weight"
    elif any(getattr(module, hooks) for hooks in _HOOKS):
        problem = "has hooks"
    else:
        weight = module.get_parameter("weight")
        try:
            marks_of(weight)
        except ValueError as error:
            problem = f"has a weight that {error}"
    if problem:
        _refuse(module_name, problem)
    return weight


def _refuse(module_name: str, problem: str) -> NoReturn:
    raise SettingExit(
        "megatron_pp_ext: --pipeline-vocabulary shared cuts embedding and output layer by rows, and the "
        f"model's {module_name} {problem}; leave it out"
    )


_STOCK_MARKS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "is_embedding_or_output_parameter": True,
}
"""The attributes that Megatron gives both weights."""


def _marks(pipeline: Pipeline, *ends: tuple[torch.nn.Parameter | None, int]) -> list[Marks]:
    """Return the marks of each weight from the rank that built it, on all ranks of the pipeline; collective.

    A rank that rehearses alone cannot know, and all have to rehearse one schedule: there nothing is frozen.
    """
    if pipeline.rehearsal is not None:
        return [Marks(True, _STOCK_MARKS) for _ in ends]
    group = parallel_state.get_pipeline_model_parallel_group()
    local = [None if weight is None else marks_of(weight) for weight, _ in ends]
    of_all = [local] * group.size()
    dist.all_gather_object(of_all, local, group=group)
    marks_of_ends = [of_all[home][number] for number, (_, home) in enumerate(ends)]
    return [marks for marks in marks_of_ends if marks is not None]


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
