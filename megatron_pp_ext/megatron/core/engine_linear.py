"""Cuts the backward of Transformer Engine's linear layers (2.3 to 2.20) in two."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.megatron.core.data_parallel import Gradients, defer_weights
from megatron_pp_ext.megatron.core.parameters import has_second_use
from megatron_pp_ext.megatron.patching import substitute
from megatron_pp_ext.runtime.activation_meter import plain_tensors
from megatron_pp_ext.runtime.split import STORE, Layer, OwnPart, has_hooks


class _Tokens(NamedTuple):
    """Where a tensor has the tokens: along ``dim``, ``block`` of them in each entry."""

    dim: int
    block: int


_DATA, _SCALES = "_columnwise_data", "_columnwise_scale_inv"
_LAYOUTS: Mapping[str, Mapping[str, _Tokens]] = {
    "MXFP8": {_DATA: _Tokens(0, 1), _SCALES: _Tokens(0, 32)},
    "Float8BlockwiseQ": {_DATA: _Tokens(1, 1), _SCALES: _Tokens(0, 128)},
    "NVFP4": {_DATA: _Tokens(1, 2), _SCALES: _Tokens(1, 16)},
}
"""A quantized operand keeps its numbers and its scales in plain tensors of their own.  Those that the product
of a weight gradient reads have the tokens along one dimension, padded or not; by class (Transformer Engine
2.3 to 2.20, ``transformer_engine/pytorch/tensor/storage``, and ``pytorch/distributed.py`` for the gathers):

========================  ======================  =========================================
class                     attribute               shape, for T tokens and K features
========================  ======================  =========================================
``Float8Tensor``          ``_transpose``          [K, T]; or ``_data`` [T, K] for both uses
``MXFP8Tensor``           ``_columnwise_data``    [T, K]
..                        ``..._scale_inv``       [T / 32, padded to 4; K, padded to 128]
``Float8BlockwiseQ...``   ``_columnwise_data``    [K, T]
..                        ``..._scale_inv``       [T / 128; K, padded to 4]
``NVFP4Tensor``           ``_columnwise_data``    [K, T / 2]
..                        ``..._scale_inv``       [K, padded to 128; T / 16, padded to 4]
========================  ======================  =========================================

Where a rank's tokens are no whole number of blocks, Transformer Engine gathers in high precision and
quantizes then; such blocks belong to several ranks, and the operand stays whole.
"""


class OwnOperand:
    """A quantized operand of which only this rank's ``parts`` are kept, by the attributes they belong to."""

    def __init__(self, operand: Any, parts: Mapping[str, OwnPart]) -> None:
        self._operand, self._parts = operand, parts
        for attribute in parts:
            setattr(operand, attribute, None)

    @property
    def parts(self) -> tuple[OwnPart, ...]:
        return tuple(self._parts.values())

    def take(self) -> Any:
        """Return the operand, whole again; see ``OwnPart.take``."""
        for attribute, part in self._parts.items():
            setattr(self._operand, attribute, part.take())
        return self._operand


def own_operand(operand: Any, group: dist.ProcessGroup) -> Any:
    """Return this rank's own part of ``operand``, which ``group`` has gathered: an OwnPart or an OwnOperand.

    An operand that cannot be cut is returned as it is.
    """
    if type(operand) is torch.Tensor:
        return OwnPart.cut(operand, group)
    layout = _layout(operand)
    if layout is None or getattr(operand, "_with_gemm_swizzled_scales", False):
        return operand
    (attribute, data), *_ = layout.items()
    tokens = getattr(operand, attribute).shape[data.dim] * data.block
    if any(tokens % (dist.get_world_size(group) * place.block) for place in layout.values()):
        return operand
    parts = {
        attribute: OwnPart.cut(getattr(operand, attribute), group, place.dim, tokens // place.block)
        for attribute, place in layout.items()
    }
    return OwnOperand(operand, parts)


def whole(operand: Any) -> Any:
    """Return the operand that ``own_operand`` was given, gathered again."""
    return operand.take() if isinstance(operand, OwnPart | OwnOperand) else operand


def _layout(operand: Any) -> Mapping[str, _Tokens] | None:
    """Return the attributes of ``operand`` to cut; None for a class that is not known."""
    names = [kind.__name__ for kind in type(operand).__mro__]
    if any(name.startswith("Float8Tensor") for name in names):
        is_turned = operand._transpose is not None and not operand._transpose_invalid
        return {"_transpose": _Tokens(1, 1)} if is_turned else {"_data": _Tokens(0, 1)}
    if getattr(operand, "_is_2D_scaled", False):
        return None
    for prefix, layout in _LAYOUTS.items():
        if any(name.startswith(f"{prefix}Tensor") for name in names):
            return layout
    return None


def split_backwards(model: Iterable[Any]) -> None:
    """Let Transformer Engine's linear layers in the chunks of ``model`` leave weight gradients for later.

    Nothing changes for them under a schedule that does not split.  A module of several linear layers
    (LayerNormMLP, which Megatron does not build) keeps its whole backward.
    """
    for module in _linear_layers(model):
        module.wgrad_store = DeferringStore(module)
        # Transformer Engine would capture the product of its own queue, which stays empty.
        module.need_backward_dw = _needs_none


def _needs_none() -> bool:
    return False


def without_bulk_overlap(model: Iterable[Any]) -> bool:
    """Turn off the overlaps of --tp-comm-overlap that a split backward cannot have; return if any was on.

    In bulk, the product of the weight's gradient scatters that of the input, and the product of the input's
    gradient gathers the input for the other one.  The two products are no longer next to each other.
    """
    had_overlap = False
    for module in _linear_layers(model):
        for name in ("ub_bulk_wgrad", "ub_bulk_dgrad"):
            had_overlap = had_overlap or getattr(module, name, False)
            setattr(module, name, False)
    return had_overlap


def _linear_layers(model: Iterable[Any]) -> Iterator[Any]:
    """Yield the modules of one linear layer; operations of the op fuser compute both gradients at once."""
    for chunk in model:
        for module in chunk.modules():
            is_operation = ".ops." in type(module).__module__
            if hasattr(module, "wgrad_store") and _named(module, "weight") and not is_operation:
                yield module


_GATHERED: Mapping[str | None, int] = {"column": 0, "row": 1}
"""Which operand, (input, gradient), a layer of each parallel mode gathers; experts' layers gather none."""


class DeferringStore:
    """Replaces the ``WeightGradStore`` of one ``module``; the method names are Transformer Engine's.

    Each of Transformer Engine's linear modules (Linear, LayerNormLinear, GroupedLinear, and so Megatron's
    TELinear, TELayerNormColumnParallelLinear, TEColumnParallelLinear, TERowParallelLinear and
    TEGroupedLinear) has an object ``wgrad_store``, which decides whether the weight's gradient is computed at
    once; if not, the module hands it the product and its operands.  Transformer Engine's own store is a queue
    for each module, which has to be enabled when the module is built and runs first in, first out.  This
    store leaves the work to the W of the stage and microbatch whose I is running, as that of Megatron's local
    layers does.

    The product is bound to its operands in I: the scales of FP8 operands go with them, and the scaling of
    later microbatches cannot change them.

    Under sequence parallelism a column-parallel layer gathers its input for this product, and a row-parallel
    layer the gradient of its output for both.  The store keeps this rank's own part of either
    (``own_operand``), and W gathers it again.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._weights = _named(module, "weight")
        # A bias that the module hands out is added by its caller, and its gradient comes from there.
        self._biases = [] if getattr(module, "return_bias", False) else _named(module, "bias")
        self._is_fused = module.fuse_wgrad_accumulation
        self._is_grouped = hasattr(module, "num_gemms")

    def delay_wgrad_compute(self) -> bool:
        """Return whether the module may hand its product over.

        The answer is yes during forwards, since the backward calls again, and then only during an I.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        return self.defers or not is_in_backward

    @property
    def defers(self) -> bool:
        """Whether a backward that runs now leaves the weight gradient to W."""
        has_watchers = any(map(has_hooks, (*self._weights, *self._biases)))
        return STORE.is_collecting and not has_watchers

    def put(self, operands: Sequence[Any], product: Any) -> None:
        """Leave ``product(*operands)`` for W."""
        if self._is_grouped and not self._is_fused:
            # The buffers that W will fill are what the module returns as gradients in I.
            for buffer in self._buffers(operands):
                buffer.zero_()
        input, gradient, *buffers = operands
        layer = _layer(self._module)
        waiting = [_read_by_w(input), _read_by_w(gradient)]
        # What userbuffers gather lies in a buffer that a later layer overwrites.
        is_in_buffer = getattr(self._module, "ub_overlap_ag_dgrad", False)
        if layer is Layer.SENDS or is_in_buffer or not STORE.runs_soon:
            waiting = self._own_parts(waiting)

        def gradients() -> Gradients:
            operands = [*map(whole, waiting), *buffers]
            pairs = self._gradients(product(*operands), operands)
            return [pair for pair in pairs if _is_trained(pair[0])]

        work = defer_weights(filter(_is_trained, (*self._weights, *self._biases)), gradients)
        parts = [part for operand in waiting for part in getattr(operand, "parts", ())]
        # Fused, the buffers are the gradients themselves, which are no activations.
        tensors = plain_tensors([*waiting, *([] if self._is_fused else buffers)])
        is_free = not any(map(has_second_use, self._weights))
        STORE.defer(work, *tensors, *(part.part for part in parts), parts=parts, layer=layer, is_free=is_free)

    def _own_parts(self, pair: list[Any]) -> list[Any]:
        """Return ``pair``, input and gradient, with this rank's own part in place of a gathered operand."""
        module = self._module
        gathered = _GATHERED.get(getattr(module, "parallel_mode", None))
        if gathered is None or not getattr(module, "sequence_parallel", False):
            return pair
        if module.parallel_mode == "column" and _is_part(*pair):
            # I has gathered nothing; see ``gather_in_w``.
            rows, *dimensions = pair[0].shape
            whole_shape = torch.Size([rows * module.tp_size, *dimensions])
            return [OwnPart(pair[0], module.tp_group, whole_shape), pair[1]]
        own_part = own_operand(pair[gathered], module.tp_group)
        return [own_part if place == gathered else operand for place, operand in enumerate(pair)]

    def _gradients(self, result: Any, operands: Sequence[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield the parameters whose gradients W still has to add, each with the gradient.

        A fused product has added the weights' gradients itself; biases' come with the product, unless
        I computed them.  A fused product computes these in the dtype of its buffers
        (``csrc/extensions/gemm.cpp``, seen on an H100 with 2.16.1); autograd would round them to the bias's.
        """
        if self._is_grouped:
            weights, biases = self._buffers(operands), result[1] or ()
        else:
            weights, biases = _cut(result[0], self._weights), _cut(result[1], self._biases)
        if not self._is_fused:
            yield from zip(self._weights, weights, strict=True)
        for bias, gradient in zip(self._biases, biases, strict=False):
            if gradient is not None and gradient.numel():
                yield bias, gradient.to(bias.dtype)

    def _buffers(self, operands: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the tensors that a grouped product fills with the weights' gradients: one each, or one."""
        whole = getattr(operands[2], "rowwise_data", None)
        return operands[2] if whole is None else [whole.view_as(*self._weights)]


_PARAMETERS = "inp process_group async_op quantizer"


@substitute(
    "transformer_engine.pytorch.distributed:gather_along_first_dim",
    (_PARAMETERS, f"{_PARAMETERS} output_tensor external_coalescing"),
    "the gather of an input that W alone reads",
)
def gather_in_w(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let an I leave out the gather of a layer's input, which its product does not read.

    It is the only gather that Transformer Engine's linear layers launch asynchronously.  That of quantized
    inputs stays, since a layer prepares the result for its product; so does that of a layer whose backward
    does not know its store (``Linear`` from 2.16 on, but not ``LayerNormLinear``).
    """

    def gather(inp: Any, process_group: Any, async_op: bool = False, *more_args: Any, **more: Any) -> Any:
        is_plain = type(inp) is torch.Tensor and more.get("quantizer") is None and not any(more_args)
        if async_op and is_plain:
            store = getattr(torch._C._current_autograd_node(), "wgrad_store", None)
            if isinstance(store, DeferringStore) and store.defers:
                return inp, None
        return stock(inp, process_group, async_op, *more_args, **more)

    return gather


def _is_part(input: Any, gradient: Any) -> bool:
    """Return whether ``input`` has fewer tokens than ``gradient``; either may have them in two dimensions."""
    if not type(input) is type(gradient) is torch.Tensor:
        return False
    return input.shape[:-1].numel() < gradient.shape[:-1].numel()


def _layer(module: Any) -> Layer:
    """Return the kind of ``module``, by its exchange of an input's gradient before its weight's.

    A product that scatters the result itself (userbuffers) leaves no message under way.
    """
    if hasattr(module, "num_gemms"):
        return Layer.IS_EXPERT
    is_column = getattr(module, "parallel_mode", None) == "column" and module.tp_size > 1
    is_sent = is_column and not getattr(module, "ub_overlap_rs_dgrad", False)
    return Layer.SENDS if is_sent else Layer.SENDS_NOTHING


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad


def _named(module: torch.nn.Module, prefix: str) -> list[torch.nn.Parameter]:
    """Return the product's parameters; the names of a norm's in the same module begin with layer_norm_."""
    return [
        parameter for name, parameter in module.named_parameters(recurse=False) if name.startswith(prefix)
    ]


def _cut(gradient: torch.Tensor | None, parameters: list[torch.nn.Parameter]) -> Sequence[torch.Tensor]:
    """Cut a product's rows among ``parameters``: query, key and value may be three of one module."""
    if gradient is None or not parameters:
        return ()
    return gradient.split([parameter.shape[0] for parameter in parameters])


def _read_by_w(operand: Any) -> Any:
    """Return ``operand`` without the copy of its numbers that only forward and I read.

    A quantized operand may have two, scaled along rows and along columns; the product of a weight gradient,
    which sums over rows, reads the second copy of both operands.  Transformer Engine drops the first copy of
    what it quantizes for a forward in the same way, and knows where one copy serves both uses (FP8 with one
    scale a tensor on Blackwell).  A tensor that came from autograd may have other users: it stays whole, and
    W gets another handle.  Storages of Transformer Engine 2.3 have no ``update_usage`` and keep both copies.
    """
    if isinstance(operand, list | tuple):
        return [_read_by_w(member) for member in operand]
    if not hasattr(operand, "get_data_tensors"):
        return operand
    if isinstance(operand, torch.Tensor):
        operand = operand.detach()
    if hasattr(operand, "update_usage"):
        operand.update_usage(rowwise_usage=False, columnwise_usage=True)
    elif getattr(operand, "columnwise_data", None) is not None:
        # Groups in one tensor have no update_usage.
        operand.rowwise_data = operand.scale_inv = None
    return operand
