"""A training loop on megatron.core alone, as a user would write one; it knows nothing of schedules.

Weights and batches depend on names and numbers alone, so that runs on any placement can be compared.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_pp_ext.megatron.core.parameters import global_parameters

CHUNKS = {"1f1b": 1, "zb-h1": 1, "v-half": 2, "interleaved": 2, "flex": 2, "auto": 2}
"""Schedules to compare, and their chunks a rank."""

TIED = ("zb-h1", "v-half")
"""The schedules under which a tied embedding is trained, too: its copies are on two ranks, and on one."""

COUNTS = (8, 3, 5)
"""The microbatches of the steps of a run."""

LAYERS, HIDDEN, WORDS, LENGTH = 8, 16, 32, 8

RATE = 1e-2
"""The learning rate."""


@dataclass
class Record:
    """The results of a run: the losses of each step, and by global names gradients and weights.

    The gradients are those of each of the ``steps``, and those of the last one.
    """

    losses: list[list[float]] = field(default_factory=list)
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def start(ranks: int = 2) -> None:
    """Make the process groups of a pipeline of ``ranks``."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, ranks)
    model_parallel_cuda_manual_seed(1)


def config_of(chunks: int, **more: Any) -> TransformerConfig:
    """Return the config of a small GPT with ``chunks`` chunks a rank."""
    # Some of Megatron's functions read the number of chunks from here.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2}
    kind = MLATransformerConfig if more.get("multi_latent_attention") else TransformerConfig
    return kind(
        **sizes,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **more},
    )


def gpt(config: TransformerConfig, **arguments: Any) -> GPTModel:
    """Return a chunk of a GPT."""
    return GPTModel(config, get_gpt_layer_local_spec(), **arguments)


def predicting(config: TransformerConfig, **arguments: Any) -> GPTModel:
    """The same with multi-token prediction, in the stage where the config's layout has it."""
    _make_classes_of_engine()
    layer = get_gpt_layer_local_spec()
    prediction = get_gpt_mtp_block_spec(
        config, layer, use_transformer_engine=False, vp_stage=arguments["vp_stage"]
    )
    return GPTModel(config, layer, mtp_block_spec=prediction, position_embedding_type="rope", **arguments)


def _make_classes_of_engine() -> None:
    """Put a class where Megatron 0.20 has none without Transformer Engine, and asks what is one of it."""
    with suppress(ImportError):
        from megatron.core.tensor_parallel import inference_layers

        for name, value in vars(inference_layers).items():
            if name.endswith("ColumnParallelLinear") and not isinstance(value, type):
                setattr(inference_layers, name, type(name, (), {}))


def hybrid(config: TransformerConfig, **arguments: Any) -> Any:
    """Return a chunk of a hybrid of attention and MLP layers, whose pattern has a segment a stage."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from tests.support.hybrid_layers import stack

    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    pattern = "|".join(["*-" * (LAYERS // 2 // stages)] * stages)
    return HybridModel(config, stack, hybrid_layer_pattern=pattern, **arguments)


def build(
    chunks: int,
    tied: bool = False,
    config: TransformerConfig | None = None,
    model_class: Callable[..., Any] = gpt,
    overlaps: bool = False,
    is_distributed: bool = False,
    **more: Any,
) -> list[DistributedDataParallel]:
    """Build the chunks of this rank, with weights that follow from their names.

    With ``overlaps`` gradients are reduced over replicas during the step; ``is_distributed`` says whether the
    optimizer is.
    """
    config = config or config_of(chunks, **more)
    model = []
    for chunk in range(chunks):
        ends: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk if chunks > 1 else None}
        part = model_class(
            config,
            vocab_size=WORDS,
            max_sequence_length=4 * LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=tied,
            vp_stage=ends["vp_stage"],
        )
        model.append(part)
    for name, parameter in global_parameters(model):
        seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        # A part of a shared vocabulary has its rows of the whole weight.
        first, rows = getattr(parameter, "rows_of_whole", (0, len(parameter)))
        values = torch.randn(rows, *parameter.shape[1:], generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values[first : first + len(parameter)] * 0.1)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=overlaps, use_distributed_optimizer=is_distributed
    )
    return [DistributedDataParallel(config=config, ddp_config=settings, module=part) for part in model]


def batches(lengths: tuple[int, ...] = (LENGTH,), seed: int = 7) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of one sample, whose lengths go round ``lengths``."""
    generator, number = torch.Generator().manual_seed(seed), 0
    while True:
        length = lengths[number % len(lengths)]
        tokens, number = torch.randint(0, WORDS, (1, length + 1), generator=generator), number + 1
        yield {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(length)[None],
            "attention_mask": torch.triu(torch.ones(1, 1, length, length), 1).bool(),
        }


def forward_step(iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the losses of a batch, and the function that makes one loss of them."""
    batch = next(iterator)
    return model(**batch), partial(_mean)


def _mean(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return losses.detach().clone()
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def run_step(model: list[Any], iterators: list[Any], count: int, **about: Any) -> list[Any]:
    """Run ``count`` microbatches, and return megatron.core's result on this rank."""
    run = schedules.get_forward_backward_func()
    return run(
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=count,
        micro_batch_size=1,
        **{"forward_step_func": forward_step, "seq_length": LENGTH, "forward_only": False, **about},
    )


def train(
    model: list[Any],
    counts: tuple[int, ...],
    lengths: tuple[int, ...] = (LENGTH,),
    seed: int = 7,
    rate: float = RATE,
    **about: Any,
) -> Record:
    """Train by one step for each of ``counts``, which are numbers of microbatches."""
    record, iterators = Record(), [batches(lengths, seed) for _ in model]
    optimizer = torch.optim.Adam([parameter for chunk in model for parameter in chunk.parameters()], lr=rate)
    for count in counts:
        for chunk in model:
            chunk.zero_grad_buffer()
        losses = run_step(model, iterators, count, **about)
        record.losses.append([float(entry["loss"]) for entry in losses])
        finalize_model_grads(model)
        for name, parameter in global_parameters(model):
            parameter.grad = parameter.main_grad
            record.gradients[name] = parameter.main_grad.clone()
        record.steps.append(dict(record.gradients))
        optimizer.step()
        optimizer.zero_grad()
    record.weights = {name: parameter.detach().clone() for name, parameter in global_parameters(model)}
    return record


def _whole(ranks: list[Record], field: str) -> dict[str, torch.Tensor]:
    """Return the gradients or weights of all ranks by name."""
    merged: dict[str, torch.Tensor] = {}
    for record in ranks:
        merged.update(getattr(record, field))
    return merged


def assert_close_gradients(ranks: list[Record], stock: list[Record]) -> None:
    """The gradients of all ranks together are stock's, up to the order of sums."""
    expected, actual = _whole(stock, "gradients"), _whole(ranks, "gradients")
    assert expected.keys() == actual.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def assert_same(ranks: list[Record], stock: list[Record]) -> None:
    """The losses of each step are where the caller looks, on the last rank; all numbers are stock's."""
    assert stock[-1].losses and all(stock[-1].losses)
    assert [record.losses for record in ranks] == [record.losses for record in stock]
    for kind in ("gradients", "weights"):
        expected, actual = _whole(stock, kind), _whole(ranks, kind)
        assert expected.keys() == actual.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
