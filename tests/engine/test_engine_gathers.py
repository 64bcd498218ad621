"""What Transformer Engine's layers gather, keep for W, and compute while messages travel."""

import functools
import inspect
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

if not hasattr(sys.modules.get("transformer_engine_torch"), "__getattr__"):
    pytest.skip(
        "runs by itself (pytest tests/engine), and TRANSFORMER_ENGINE has to name a checkout",
        allow_module_level=True,
    )

import torch
import torch.distributed as dist
import transformer_engine.pytorch as engine

from megatron_pp_ext.megatron import frameworks, patching
from megatron_pp_ext.megatron.core.engine_linear import _LAYOUTS, _layout, own_operand, split_backwards
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Owner
from tests.support.ranks import run_ranks

HIDDEN, TOKENS = 128, 64
QKV, FFN = HIDDEN * 5 // 4, HIDDEN * 7 // 2
"""The widths of Llama 3 70B for its hidden size: 8 of 64 heads have keys and values."""
BEFORE, NOW = Owner(0, 0), Owner(0, 1)


class Layer(torch.nn.Module):
    """A transformer layer's four products, without attention."""

    def __init__(self, group, is_sequence_parallel):
        super().__init__()
        both = {
            "bias": False, "params_dtype": torch.bfloat16, "device": "cpu", "fuse_wgrad_accumulation": True,
            "tp_group": group, "tp_size": group.size(), "sequence_parallel": is_sequence_parallel,
        }  # fmt: skip
        column = {**both, "parallel_mode": "column", "normalization": "RMSNorm"}
        row = {**both, "parallel_mode": "row"}
        self.qkv = engine.LayerNormLinear(HIDDEN, QKV, **column)
        self.proj = engine.Linear(HIDDEN, HIDDEN, **row)
        self.fc1 = engine.LayerNormLinear(HIDDEN, 2 * FFN, **column)
        self.fc2 = engine.Linear(FFN, HIDDEN, **row)

    def forward(self, x):
        a = self.qkv(x)
        width = self.proj.weight.shape[1]
        x = x + self.proj(torch.tanh(a[..., :width]) + a[..., width:].sum(-1, keepdim=True))
        up, gate = self.fc1(x).chunk(2, -1)
        return x + self.fc2(torch.nn.functional.silu(gate) * up)


def noted(events):
    """Note messages as they are launched, and products as they run, in ``events``."""
    for name, word in (
        ("all_gather_into_tensor", "gather"),
        ("reduce_scatter_tensor", "scatter"),
        ("all_reduce", "sum"),
    ):
        setattr(dist, name, functools.partial(_launch, events, word, getattr(dist, name)))
    defer = STORE.defer

    def noting(work, *tensors, **kwargs):
        number = sum(event.startswith("put") for event in events)
        events.append(f"put {number}")
        defer(lambda: (work(), events.append(f"product {number}")), *tensors, **kwargs)

    STORE.defer = noting


def _launch(events, word, stock, *args, **kwargs):
    events.append(word)
    work = stock(*args, **kwargs)
    if not kwargs.get("async_op"):
        return work
    return SimpleNamespace(wait=lambda: (events.append(f"wait {word}"), work.wait()))


def prepared(ranks, is_sequence_parallel):
    dist.init_process_group("gloo")
    patching.apply_when_imported((), frameworks.ENGINE)
    patching.apply_imported()
    torch.manual_seed(dist.get_rank())
    layer = Layer(dist.group.WORLD, is_sequence_parallel)
    tokens = TOKENS // ranks if is_sequence_parallel else TOKENS
    torch.manual_seed(dist.get_rank() if is_sequence_parallel else 0)
    inputs = [torch.randn(tokens, 1, HIDDEN).bfloat16().requires_grad_() for _ in range(3)]
    return layer, inputs


def losses(layer, inputs):
    for parameter in layer.parameters():
        parameter.grad, parameter.main_grad = None, torch.zeros(parameter.shape)
    for input in inputs:
        input.grad = None
    return [layer(input).float().square().sum() for input in inputs]


def all_gradients(layer, inputs):
    parameters = [
        (p.main_grad.clone(), None if p.grad is None else p.grad.clone()) for p in layer.parameters()
    ]
    return parameters, [input.grad.clone() for input in inputs]


def train(rank, ranks, is_sequence_parallel):
    """Three microbatches: an I alone, one that another's W lends to, and one that its own W lends to."""
    layer, inputs = prepared(ranks, is_sequence_parallel)
    for loss in losses(layer, inputs):
        loss.backward()
    stock = all_gradients(layer, inputs)
    split_backwards([layer])
    STORE.meter = ActivationMeter(layer.parameters())
    first, second, third = losses(layer, inputs)
    events = []
    noted(events)
    kept = STORE.meter.live_bytes
    with STORE.collecting(BEFORE):
        first.backward()
    waiting, alone = STORE.meter.live_bytes - kept, [*events]
    events.clear()
    with STORE.beside(BEFORE), STORE.collecting(NOW):
        second.backward()
    lent = [*events]
    events.clear()
    STORE.run(BEFORE)
    rest = [*events]
    STORE.run(NOW)
    last = Owner(0, 2)
    with STORE.beside(last), STORE.collecting(last):
        third.backward()
    STORE.run(last)
    STORE.meter = None
    return stock, all_gradients(layer, inputs), waiting, alone, lent, rest


def same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return ours is theirs is None or all(same(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_bits_and_bytes(ranks, is_sequence_parallel):
    """Own parts wait: of the four operands that are gathered, one rank's tokens each."""
    found = run_ranks(train, ranks, ranks, is_sequence_parallel)
    for stock, ours, waiting, *_ in found:
        assert same(ours, stock)
        whole, cut = 2 * TOKENS * HIDDEN, 2 * TOKENS * HIDDEN // ranks
        gathered = 4 * (cut if is_sequence_parallel else whole)
        # Gradients of what column layers make, and inputs of row layers, are a rank's own anyhow.
        divided = 2 * TOKENS * (QKV + HIDDEN + 2 * FFN + FFN) // ranks
        assert waiting == gathered + divided
    assert len({str(events) for _, _, _, *events in found}) == 1


def test_the_order_of_calls():
    """Gradients of row layers are gathered in I; inputs are not, and W launches gathers ahead."""
    *_, alone, lent, rest = run_ranks(train, 2, 2, True)[0]
    assert alone == [
        "gather", "put 0",
        "scatter", "put 1", "wait scatter",
        "gather", "put 2",
        "scatter", "put 3", "wait scatter",
    ]  # fmt: skip
    assert lent == [
        "gather", "gather", "put 0",
        "scatter", "put 1", "wait gather", "product 0", "wait scatter",
        "gather", "put 2", "gather",
        "scatter", "put 3", "wait gather", "product 2", "wait scatter",
    ]  # fmt: skip
    assert rest == ["gather", "gather", "wait gather", "product 1", "wait gather", "product 3"]


def gathered_by_engine(rank, name):
    """An operand that Transformer Engine gathers, of bytes that each rank draws, and what is kept of it."""
    import transformer_engine_torch as extension
    from transformer_engine.pytorch import distributed, tensor
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    e4m3 = extension.DType.kFloat8E4M3
    quantizer, tokens = {
        "Float8": lambda: (tensor.Float8CurrentScalingQuantizer(e4m3, device="cpu"), 24),
        "MXFP8": lambda: (tensor.MXFP8Quantizer(e4m3), 96),
        "Float8BlockwiseQ": lambda: (tensor.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True), 128),
        "NVFP4": lambda: (tensor.NVFP4Quantizer(extension.DType.kFloat4E2M1), 48),
    }[name]()
    quantizer.set_usage(rowwise=name == "Float8", columnwise=True)
    quantizer.block_scaling_dim = 1
    # Kernels that move bytes, and gloo's missing way to launch several messages at once.
    extension.swap_first_dims = lambda x, out: (
        x.transpose(0, 1).contiguous() if out is None else out.copy_(x.transpose(0, 1))
    )
    extension.fp8_transpose = lambda x, *unused, out: x.t().contiguous()
    dist._coalescing_manager = lambda **unused: nullcontext()
    distributed.pad_columnwise_scale_inv = lambda x: torch.nn.functional.pad(
        x, (0, -x.shape[1] % 4, 0, -x.shape[0] % 128)
    )

    def create(quantizer, shape, dtype, *unused):
        """Make an empty operand, whose bytes are drawn: the extension's own allocator, which is compiled."""
        (kind,) = (
            one for one in QuantizedTensorStorage.__subclasses__() if one.__name__ == f"{name}TensorStorage"
        )
        layout = _LAYOUTS.get(name, {})
        where = layout.get("_columnwise_data")
        columns = (shape[1], shape[0] // where.block) if where and where.dim else tuple(shape)
        scales = tuple(quantizer.get_scale_shape(shape, True)) if layout else ()
        drawn = {"data": tuple(shape), "columnwise_data": columns, "columnwise_scale_inv": scales}
        values = {key: torch.randint(256, form, dtype=torch.uint8) for key, form in drawn.items()}
        values |= {"rowwise_data": None, "rowwise_scale_inv": None, "fp8_scale_inv": torch.ones(1)}
        values |= {"amax_rowwise": None, "amax_columnwise": None, "quantizer": quantizer}
        values |= {"fp8_dtype": e4m3, "fp4_dtype": e4m3, "fake_dtype": dtype, "dtype": dtype}
        values |= {"is_2D_scaled": False, "with_gemm_swizzled_scales": False, "row_scaled_nvfp4": False}
        names = inspect.signature(kind.__new__).parameters
        return kind(**{key: value for key, value in values.items() if key in names})

    extension.create_empty_quantized_tensor = create
    mine = quantizer.make_empty([tokens, 256], dtype=torch.bfloat16, device="cpu")
    whole, _ = distributed.gather_along_first_dim(mine, dist.group.WORLD, quantizer=quantizer)
    layout = _layout(whole)

    def with_tokens():
        """Copies of the tensors without padding, which nothing reads."""
        return [
            getattr(whole, attribute)
            .narrow(where.dim, 0, dist.get_world_size() * tokens // where.block)
            .clone()
            for attribute, where in layout.items()
        ]

    before = with_tokens()
    own = own_operand(whole, dist.group.WORLD)
    assert all(getattr(whole, attribute) is None for attribute in layout)
    kept = sum(part.part.nbytes for part in own.parts)
    assert own.take() is whole
    return before, with_tokens(), kept


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["Float8", "MXFP8", "Float8BlockwiseQ", "NVFP4"])
def test_quantized_operands_are_cut_and_gathered_as_bytes(name, ranks):
    for before, after, kept in run_ranks(gathered_by_engine, ranks, name):
        assert all(map(torch.equal, after, before))
        assert kept * ranks == sum(tensor.nbytes for tensor in before)
