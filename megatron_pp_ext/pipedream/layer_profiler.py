"""Measures the costs of each layer, while Megatron trains under its own schedules.

A rank times the pieces of the chunks it holds: the embedding, every layer of the decoder, and what follows it
(final norm, output layer, loss).  Forwards are timed by module hooks.  Backwards are timed where gradients
arrive at the tensors between the pieces: the gradient of a piece's output is there before the piece's
backward begins, and that of its input once the backward has ended.  Module hooks for backwards would not do:
Megatron passes activations by keyword, which such hooks do not see.

The first step, which warms up, counts the bytes that each piece keeps for its backward; all later ones are
timed, and every microbatch of them counts.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from megatron_pp_ext.files import going_on_without
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.runners.tracing import is_first_pipeline
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.recorder import gather
from megatron_pp_ext.runtime.split import Owner
from megatron_pp_ext.schedule.formats import profile
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer

_profiler: "StageProfiler | None" = None
"""The profiler of this rank, from the first profiled step on."""


@contextmanager
def profiling(group: dist.ProcessGroup, model: list[torch.nn.Module], forward_only: bool) -> Iterator[None]:
    """Profile a training step if --profile-pipeline requests it, and write the file at its end.

    Every step replaces the file by one with more microbatches to take medians of.  Only the pipeline of
    global rank 0 is profiled.
    """
    global _profiler
    path = requested.require().profile
    if path is None or forward_only or not is_first_pipeline(group):
        yield
        return
    if _profiler is None:
        _profiler = StageProfiler(unwrap_model(model))
    with _profiler.step():
        yield
    if _profiler.steps < 2:
        return
    stages = gather(_profiler.layers(), group)
    if stages is not None:
        in_order = sorted(itertools.chain(*stages), key=operator.itemgetter(0))
        with going_on_without(path):
            profile.write(Profile.chain(layer for _, layer in in_order), path)


@dataclass
class ModelPiece:
    """The measurements of one layer; ``number`` orders the pieces of all ranks."""

    number: int
    name: str
    symbol: str
    parameter_bytes: int
    activation_bytes: int = 0
    saved_bytes: list[int] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def layer(self) -> ProfiledLayer:
        """Return the medians over all microbatches."""
        return ProfiledLayer(
            name=self.name,
            forward_seconds=median(self.forward),
            backward_seconds=median(self.backward),
            activation_bytes=self.activation_bytes,
            parameter_bytes=self.parameter_bytes,
            saved_bytes=median(self.saved_bytes),
            symbol=self.symbol,
        )


class StageProfiler:
    """Profiles the chunks of one rank."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self.steps = 0
        self._meter = ActivationMeter(parameter for chunk in chunks for parameter in chunk.parameters())
        self._chunks = [_ChunkProfiler(chunk, self._meter) for chunk in chunks]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one training step: bytes in the first, seconds in the others."""
        self.steps += 1
        for chunk in self._chunks:
            chunk.begin_step(counts_bytes=self.steps == 1)
        yield
        for chunk in self._chunks:
            chunk.end_step()

    def layers(self) -> list[tuple[int, ProfiledLayer]]:
        """Return every piece of this rank with its number."""
        return [(piece.number, piece.layer()) for chunk in self._chunks for piece in chunk.pieces]


class _ChunkProfiler:
    """Measures one chunk of the model.

    ``_open`` is the piece that is running, ``_marks`` are pairs of events to read once the device is done,
    and ``_tensors`` are the chunk's input and each piece's output in this forward.
    """

    def __init__(self, chunk: Any, meter: ActivationMeter) -> None:
        self._meter = meter
        self._counts_bytes = self._is_measuring = False
        self._open: ModelPiece | None = None
        self._watch = ExitStack()
        self._began = _now()
        self._marks: list[tuple[list[float], Any, Any]] = []
        self._tensors: list[torch.Tensor | None] = []
        self._layers = list(chunk.decoder.layers)
        self._embedding: ModelPiece | None = None
        if chunk.pre_process:
            self._embedding = _piece(chunk, 0, "embedding", "E", chunk.embedding.parameters())
        self._output = _output(chunk) if chunk.post_process else None
        inner = [
            _piece(chunk, layer.layer_number, f"layer {layer.layer_number}", "t", layer.parameters())
            for layer in self._layers
        ]
        self.pieces = [piece for piece in (self._embedding, *inner, self._output) if piece is not None]
        chunk.register_forward_pre_hook(self._chunk_begins)
        for layer, piece in zip(self._layers, inner, strict=True):
            layer.register_forward_pre_hook(functools.partial(self._layer_begins, piece), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self._layer_ends, piece))
        chunk.register_forward_hook(self._chunk_ends)

    def begin_step(self, counts_bytes: bool) -> None:
        """Measure from now on, bytes or seconds."""
        self._is_measuring, self._counts_bytes = True, counts_bytes

    def end_step(self) -> None:
        self._is_measuring = False
        torch.cuda.synchronize()
        for seconds, start, end in self._marks:
            seconds.append(start.elapsed_time(end) / 1e3)
        self._marks.clear()

    def _chunk_begins(self, chunk: Any, args: Any) -> None:
        if not self._is_measuring:
            return
        self._tensors = [None if chunk.pre_process else chunk.decoder.input_tensor]
        first = self._embedding or (None if self._layers else self._output)
        if first is not None:
            self._begin(first)

    def _layer_begins(self, piece: ModelPiece, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_measuring:
            return
        if self._open is not None:
            self._end(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        self._begin(piece)

    def _layer_ends(self, piece: ModelPiece, layer: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._is_measuring:
            return
        self._end(output[0] if isinstance(output, tuple) else output)
        if layer is self._layers[-1] and self._output is not None:
            self._begin(self._output)

    def _chunk_ends(self, chunk: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if not self._is_measuring:
            return
        if self._open is not None:
            self._end(output)
        if not self._counts_bytes:
            self._await_gradients()

    def _begin(self, piece: ModelPiece) -> None:
        self._open = piece
        if self._counts_bytes:
            piece.saved_bytes.append(-self._meter.live_bytes)
            self._watch.enter_context(self._meter.forward(Owner(piece.number, len(piece.saved_bytes))))
        else:
            self._began = _now()

    def _end(self, output: torch.Tensor) -> None:
        piece, self._open = self._open, None
        assert piece is not None
        if self._counts_bytes:
            self._watch.close()
            piece.saved_bytes[-1] += self._meter.live_bytes
            piece.activation_bytes = output.numel() * output.element_size()
        else:
            self._marks.append((piece.forward, self._began, _now()))
        self._tensors.append(output)

    def _await_gradients(self) -> None:
        tensors, self._tensors = self._tensors, []
        arrived: dict[int, Any] = {}

        def arrives(number: int, gradient: torch.Tensor) -> None:
            arrived[number] = _now()
            if number == len(self.pieces):
                # Called at the end of the whole backward: the embedding's input has no gradient to wait for.
                torch.autograd.Variable._execution_engine.queue_callback(ended)

        def ended() -> None:
            end = _now()
            for number, piece in enumerate(self.pieces):
                self._marks.append((piece.backward, arrived[number + 1], arrived.get(number, end)))

        for number, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(functools.partial(arrives, number))


def _now() -> Any:
    """Record an event on the device; on a machine without one, its stub holds the time of a clock."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _output(chunk: Any) -> ModelPiece:
    """Return the piece after the layers, with the weights it would have on a stage of its own.

    There, the output layer has a copy of weights that are tied to the embedding's.
    """
    elsewhere = {id(parameter) for layer in chunk.decoder.layers for parameter in layer.parameters()}
    if chunk.pre_process:
        elsewhere |= {id(parameter) for parameter in chunk.embedding.parameters()}
    parameters = [parameter for parameter in chunk.parameters() if id(parameter) not in elsewhere]
    if chunk.pre_process and chunk.share_embeddings_and_output_weights:
        parameters.append(chunk.shared_embedding_or_output_weight())
    return _piece(chunk, chunk.config.num_layers + 1, "output", "L", parameters)


def _piece(chunk: Any, number: int, name: str, letter: str, parameters: Iterable[torch.Tensor]) -> ModelPiece:
    """Return a piece without measurements.

    ``letter`` stands for the piece in a pipeline layout, which only GPTs have; a hybrid model is cut by its
    pattern.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return ModelPiece(number, name, letter if isinstance(chunk, GPTModel) else "", size)
