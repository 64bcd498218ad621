"""What stands in for Transformer Engine's store, with a layer that asks it as Transformer Engine's do.

Transformer Engine's own layers are in tests/engine.
"""

import functools
from argparse import Namespace
from random import Random
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import RowParallelLinear

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import least_limits
from megatron_pp_ext.job.pipeline import require_backwards_in_order, require_first_first
from megatron_pp_ext.megatron.core.engine_linear import DeferringStore, split_backwards, without_bulk_overlap
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from tests.support import training
from tests.support.flags import assert_refused, read

ROWS, WIDTH, OUT, GROUPS = 6, 4, 3, 2


class Asking(torch.autograd.Function):
    """A product, or one for each half of the rows, that asks as Transformer Engine's modules do."""

    @staticmethod
    def forward(ctx, input, layer, *parameters):
        ctx.save_for_backward(input)
        ctx.layer = layer
        ctx.store = layer.wgrad_store if layer.wgrad_store.delay_wgrad_compute() else None
        rows = input.split(ROWS // layer.groups)
        return torch.cat(
            [torch.nn.functional.linear(x, *pair) for x, pair in zip(rows, layer.pairs(), strict=True)]
        )

    @staticmethod
    def backward(ctx, gradient):
        layer, (input,) = ctx.layer, ctx.saved_tensors
        xs, dys = (whole.split(ROWS // layer.groups) for whole in (input, gradient))
        weights = [weight for weight, _ in layer.pairs()]
        is_fused = layer.fuse_wgrad_accumulation
        out = [w.main_grad if is_fused else torch.full_like(w, torch.nan) for w in weights]

        def product(inputs, gradients, *buffers):
            for x, dy, buffer in zip(inputs, gradients, out, strict=True):
                value = dy.t() @ x
                buffer.add_(value) if is_fused else buffer.copy_(value)
            # In the dtype of the buffers: that is fp32 where they are main_grad, whatever the bias's.
            return out, [dy.sum(0, dtype=out[0].dtype) for dy in gradients], None

        def single(x, dy):
            (weight,), (bias,), _ = product([x], [dy])
            return weight, bias

        weight_gradients, bias_gradients = list(out), [None] * layer.groups
        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            if layer.groups > 1:
                ctx.store.put([list(xs), list(dys), out], product)
            else:
                ctx.store.put([*xs, *dys], single)
                weight_gradients = [None]
        else:
            _, bias_gradients, _ = product(xs, dys)
        if is_fused:
            for weight in weights:
                weight.grad_added_to_main_grad = True
            weight_gradients = [torch.full_like(weight, torch.nan) for weight in weights]
        input_gradient = torch.cat([dy @ w for dy, w in zip(dys, weights, strict=True)])
        return input_gradient, None, *weight_gradients, *bias_gradients


class Layer(torch.nn.Module):
    def __init__(self, groups: int, fused: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups, self.fuse_wgrad_accumulation = groups, fused
        if groups > 1:
            self.num_gemms = groups
        for kind, shape in (("weight", (OUT, WIDTH)), ("bias", (OUT,))):
            for group in range(groups):
                name = f"{kind}{group if groups > 1 else ''}"
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
        self.wgrad_store = Never()
        self.accumulators = []
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(functools.partial(_move, parameter))
            self.accumulators.append(accumulator)

    def pairs(self):
        """(weight, bias) of each group."""
        parameters = list(self.parameters())
        return list(zip(parameters[: self.groups], parameters[self.groups :], strict=True))

    def forward(self, input):
        return Asking.apply(input, self, *self.parameters())


class Never:
    def delay_wgrad_compute(self) -> bool:
        return False


def _move(parameter: torch.nn.Parameter, *_: Any) -> None:
    """What Megatron's data parallelism does with a gradient that autograd brings."""
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def run_microbatches(layer: Layer, split: bool, count: int = 3) -> list[torch.Tensor]:
    """All forwards, then all backwards; returns the inputs' gradients."""
    dtype = next(layer.parameters()).dtype
    inputs = [
        torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
        for seed in range(count)
    ]
    outputs = [layer(input) for input in inputs]
    for microbatch, output in enumerate(outputs):
        loss = output.square().sum()
        if split:
            with STORE.collecting(Owner(0, microbatch)):
                loss.backward()
        else:
            loss.backward()
    return [input.grad for input in inputs]


@pytest.mark.parametrize("groups", [1, GROUPS])
@pytest.mark.parametrize(
    ("fused", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_gradients_come_with_w_and_are_the_same(groups, fused, dtype):
    whole, cut = Layer(groups, fused, dtype), Layer(groups, fused, dtype)
    expected = run_microbatches(whole, split=False)
    split_backwards([torch.nn.Sequential(cut)])
    assert all(map(torch.equal, run_microbatches(cut, split=True), expected))
    assert not any(parameter.main_grad.any() for parameter in cut.parameters())
    assert_same_in_w(cut, whole)
    # A whole backward is the layer's own.
    run_microbatches(whole, split=False)
    run_microbatches(cut, split=False)
    assert_same(cut, whole)


def assert_same_in_w(cut: Layer, whole: Layer) -> None:
    """Once the Ws of three microbatches have run."""
    for microbatch in range(3):
        STORE.run(Owner(0, microbatch))
    assert_same(cut, whole)


def assert_same(cut: Layer, whole: Layer) -> None:
    for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        assert theirs.main_grad.any()
        assert torch.equal(ours.main_grad, theirs.main_grad)


def test_what_waits_is_counted():
    """Input and output gradient, and not the fused product's result, which is the gradient buffer."""
    layer = Layer(GROUPS, fused=True)
    split_backwards([layer])
    STORE.meter = ActivationMeter(layer.parameters())
    try:
        run_microbatches(layer, split=True, count=1)
        assert STORE.meter.live_bytes == 4 * ROWS * (WIDTH + OUT)
        STORE.run(Owner(0, 0))
        assert STORE.meter.live_bytes == 0
    finally:
        STORE.meter = None


def test_a_parameter_is_counted_after_its_last_w():
    layer = Layer(1, fused=True)
    split_backwards([layer])
    counted = []
    for name, parameter in layer.named_parameters():
        parameter.count = lambda name=name: counted.append(name)
    run_microbatches(layer, split=True, count=2)
    STORE.run(Owner(0, 0))
    assert counted == []
    STORE.run(Owner(0, 1))
    assert sorted(counted) == ["bias", "weight"]


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_hooks_see_gradients(groups):
    """Also those that come with a product whose other gradients nobody wants to see."""
    whole, cut = Layer(groups, fused=False), Layer(groups, fused=False)
    for layer in (whole, cut):
        for _, bias in layer.pairs():
            bias.register_hook(lambda gradient: gradient / 2)
    run_microbatches(whole, split=False)
    split_backwards([cut])
    run_microbatches(cut, split=True)
    assert_same_in_w(cut, whole)


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_a_frozen_bias_gets_no_gradient(groups):
    layer = Layer(groups, fused=False)
    ((weight, bias), *_) = layer.pairs()
    bias.requires_grad_(False)
    del bias.main_grad
    split_backwards([layer])
    run_microbatches(layer, split=True, count=1)
    STORE.run(Owner(0, 0))
    assert weight.main_grad.any() and bias.grad is None


def test_a_module_of_several_products_keeps_its_backward():
    class Several(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1_weight = torch.nn.Parameter(torch.zeros(1))
            self.wgrad_store = Never()

    several, layer = Several(), Layer(1, fused=False)
    split_backwards([several, layer])
    assert isinstance(several.wgrad_store, Never)
    assert isinstance(layer.wgrad_store, DeferringStore)


def test_bulk_overlaps_are_turned_off_where_backwards_split():
    """One product scatters for the other in bulk, and they are apart then; other overlaps stay."""
    layer = Layer(1, fused=False)
    layer.ub_bulk_wgrad = layer.ub_bulk_dgrad = layer.ub_overlap_rs_dgrad = True
    assert without_bulk_overlap([torch.nn.Sequential(layer)])
    assert (layer.ub_bulk_wgrad, layer.ub_bulk_dgrad, layer.ub_overlap_rs_dgrad) == (False, False, True)
    assert not without_bulk_overlap([layer])


def test_operations_of_the_op_fuser_keep_whole_backwards():
    class Operation(Layer):
        __module__ = "transformer_engine.pytorch.ops.basic"

    operation = Operation(1, fused=False)
    split_backwards([operation])
    assert isinstance(operation.wgrad_store, Never)


def test_a_run_changes_its_layers_stores():
    """A local linear layer passes for one of Transformer Engine's: it has a weight and a store."""

    def stores(chunks):
        return [
            type(m.wgrad_store).__name__
            for chunk in chunks
            for m in chunk.modules()
            if hasattr(m, "wgrad_store")
        ]

    def pretend(chunks):
        training.initialize_by_layer(chunks)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, RowParallelLinear):
                    module.wgrad_store, module.fuse_wgrad_accumulation = Never(), False

    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--train-iters", "1"]
    for run in training.train(2, flags, initialize=pretend, grab=stores):
        assert run.grabbed == 8 * ["DeferringStore"]


ARGS = Namespace(
    pipeline_schedule="zb-h1",
    transformer_impl="transformer_engine",
    tensor_model_parallel_size=1,
    pipeline_model_parallel_layout=None,
)


def all_schedules():
    """Families, and what the compiler makes of random costs and limits."""
    yield from (catalog.build(name, p, m) for name in catalog.NAMES for p, m in ((2, 1), (3, 3), (4, 9)))
    for seed, placement in enumerate((loop(3, 2), wave(2, 4), v(4))):
        draw = Random(seed).uniform
        stages = (
            StageCosts(draw(1, 3), draw(1, 3), draw(0.1, 3), 1, draw(0, 1)) for _ in range(placement.stages)
        )
        costs = Costs(tuple(stages), draw(0, 0.5))
        limit = 1.5 * max(least_limits(costs, placement))
        found = compile_schedule(placement.ranks, 7, costs, limit, placements=[placement])
        yield found.timeline.schedule


def test_every_schedule_that_is_built_begins_with_microbatch_0_and_goes_back_in_order():
    for schedule in all_schedules():
        require_first_first(schedule)
        require_first_first(schedule.with_halved_backwards)
        require_backwards_in_order(schedule)


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_without_a_flush_a_run_begins_with_microbatch_0_and_no_update_ever_sees_it_again(interval):
    """Later updates, in which nobody is first, add to what Megatron zeroed before them."""
    ranks, updates = 4, 5
    steps = [
        Schedule("pipedream", linear(ranks), interval, orders)
        for update in range(updates)
        for orders in [pipedream.step(Replicas.straight(ranks), interval, update, updates)]
    ]
    require_first_first(steps[0])
    for step in steps[1:]:
        assert all(action.microbatch for action in step if action.kind is Kind.F)


LATE = {
    "weight gradient": (
        "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1W0,1F1,1I1,1W1\n",
        r"rank 0 runs 0W1 before microbatch 0's weight gradient, but .* overwrites earlier gradients",
    ),
    "forward": (
        "0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n",
        r"rank 0 runs 0F1 before microbatch 0's forward, but Transformer Engine casts weights",
    ),
}


@pytest.mark.parametrize("late", LATE)
def test_a_file_that_begins_with_another_microbatch_is_refused(late, tmp_path, monkeypatch):
    """Under Transformer Engine, whatever the precision; Megatron's own layers add in any order."""
    cells, message = LATE[late]
    file = tmp_path / "late.csv"
    file.write_text(cells)
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule csv:{file}"
    flags += " --transformer-impl"
    message += ".*put microbatch 0 first, or add --transformer-impl local"
    assert_refused(monkeypatch, f"{flags} transformer_engine", message)
    assert read(monkeypatch, f"{flags} local") is not None
