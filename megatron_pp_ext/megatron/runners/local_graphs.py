"""Megatron's own CUDA graphs of layers (--cuda-graph-impl local) under a schedule with whole backwards.

Megatron notes in which order layers go forward and backward in the first training step, captures them in
this order when the step has ended (``pipeline_runner.end_step``), and replays one pair of graphs for each
call of a layer from then on.  All graphs share one pool of memory, so they are right in this order alone:
steps of another one, and evaluations, run without graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs as stock_graphs
from torch.utils._pytree import tree_leaves

from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule.actions import Action


class LocalGraphs:
    """The graphs of one model: they hold the actions of its first training step."""

    def __init__(self) -> None:
        self._captured: Sequence[Sequence[Action]] | None = None

    @contextmanager
    def step(self, plan: RankPlan, inputs: StepInputs) -> Iterator[None]:
        """Surround the actions of a step, which replay graphs if they are those of the first training step.

        That step itself runs eagerly, and Megatron takes notes.  RuntimeError where it has captured another
        model of this process, since it captures once.
        """
        is_first = self._captured is None
        if inputs.forward_only or not (is_first or plan.steps == self._captured):
            with _eager(inputs.model):
                yield
            return
        if is_first and stock_graphs._CudagraphGlobalRecord.cudagraph_created:
            raise RuntimeError(
                "--cuda-graph-impl local captures one model in a process, and another one is captured; "
                "choose transformer_engine, or leave the graphs out"
            )
        with _with_outputs(inputs.config), _inputs_apart(inputs.model) if is_first else nullcontext():
            yield
        self._captured = plan.steps


@contextmanager
def _with_outputs(config: Any) -> Iterator[None]:
    """Keep the outputs of stages, which are their last layers': to free one would take it from its graph."""
    frees, config.deallocate_pipeline_outputs = config.deallocate_pipeline_outputs, False
    try:
        yield
    finally:
        config.deallocate_pipeline_outputs = frees


@contextmanager
def _inputs_apart(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let Megatron note no tensor as the input of layers in several forwards of a chunk.

    Graphs of one forward share the memory of an input.  One that outlives the forward, such as cached rotary
    embeddings, would be shared by all microbatches, and Megatron captures no backward as long as such an
    input has uses before it.
    """
    inputs: list[torch.Tensor] = []

    def note(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        inputs.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))

    def forget(*unused: Any) -> None:
        for tensor in [*inputs, *(tensor._base for tensor in inputs if tensor._base is not None)]:
            notes = getattr(tensor, "cg_buffer_metadata", None)
            if notes is not None and not notes.is_cudagraph_output:
                del tensor.cg_buffer_metadata  # type: ignore[attr-defined]
        inputs.clear()

    modules = [module for chunk in model for module in chunk.modules()]
    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in modules
        if hasattr(module, "cudagraph_manager")
    ]
    handles += [chunk.register_forward_pre_hook(forget) for chunk in model]
    try:
        yield
    finally:
        forget()
        for handle in handles:
            handle.remove()


@contextmanager
def _eager(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run the layers of ``model`` without graphs, and leave each one's next graph where it is.

    A layer's graphs take turns with each call.  A forward by a graph in an evaluation would also have the
    dropout of training.  RuntimeError where Megatron has noted a layer nevertheless.
    """
    record = stock_graphs._CudagraphGlobalRecord
    managers = [
        module
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, stock_graphs.CudaGraphManager) and module.training
    ]
    is_created, count = record.cudagraph_created, len(record.cudagraph_record)
    record.cudagraph_created = False
    for manager in managers:
        manager.training = False  # where it is not, Megatron falls back to the layer itself
    try:
        yield
    finally:
        record.cudagraph_created = is_created
        for manager in managers:
            manager.training = True
    if len(record.cudagraph_record) != count:
        raise RuntimeError(
            "a layer that is recomputed was noted for capture in a step without graphs; leave "
            "--recompute-granularity out, or choose --cuda-graph-impl transformer_engine"
        )
