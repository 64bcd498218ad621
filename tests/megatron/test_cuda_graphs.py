"""CUDA graphs under a schedule: what is captured for which slot, and losses after each replay.

No graph is captured here: dummies stand for those of torch.cuda and of Transformer Engine, whose own
Python runs in ``tests/engine/test_engine_graphs.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs as megatrons

from megatron_pp_ext.compiler import source
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.runners import choose, cuda_graphs
from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.slots import Slots


class Layer(torch.nn.Module):
    """A graphed layer; ``asked`` has what was captured of all, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.cuda_graphs: Any = []
        self.current_microbatch = 0


class Helper:
    """What hooks take from a ``TECudaGraphHelper``, whose two chunks have one and two graphed layers."""

    def __init__(self, model: Any = ()) -> None:
        self.model, self.config = model, SimpleNamespace(sequence_parallel=False)
        self.callables_per_chunk = [[Layer()], [Layer(), Layer()]]
        self.flattened_callables = [layer for layers in self.callables_per_chunk for layer in layers]
        self.num_model_chunks, self.num_microbatches = 2, 0
        self.log: list[str] = []

    def _start_capturing(self) -> float:
        self.log.append("start")
        return 0.0

    def _finish_capturing(self, start: float) -> None:
        self.log.append("finish")

    def _get_cuda_graph_input_data(self) -> Any:
        args = self._get_sample_arguments([1, 2, -1, -2], None)
        names = {
            "fp8_enabled": (False, True, False),
            "_num_layers_per_chunk": [1, 2],
            "allow_unused_input": True,
        }
        return args, {**names, "_order": "theirs", "_reuse_graph_input_output_buffers": True}

    def _get_sample_arguments(self, order: list[int], chunk_id_list: Any = None) -> Any:
        slots = self.num_microbatches
        assert order == [*[1] * slots, *[2] * slots, *[-1] * slots, *[-2] * slots]
        names = [("first", slot, 0) for slot in range(slots)]
        return names + [("second", slot, place) for slot in range(slots) for place in (0, 1)], []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of Transformer Engine's ``make_graphed_callables``, whose graphs are their numbers."""
    calls: list[Any] = []

    def make(layers: Any, args: Any, **options: Any) -> list[Any]:
        calls.append((layers, args, options))
        return [f"{len(calls)}.{at}" for at in range(len(layers))]

    monkeypatch.setattr(megatrons, "make_graphed_callables", make, raising=False)
    pools = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    return calls


@pytest.fixture
def running() -> Iterator[requested.Pipeline]:
    """V-Half on two ranks, whose first step has run on rank 0: it has 4 microbatches in flight."""
    request = named("v-half", 2, 4)
    pipeline = requested.Pipeline(request, source.Source(request, CostModel(Costs.unit)))
    requested.activate(pipeline)
    steps: Any = choose.runner(pipeline).steps
    steps._plans[4, False, None] = plan_rank(catalog.build("v-half", 2, 4), 0)
    yield pipeline
    requested.activate(None)


capture = cuda_graphs.capture_slots(lambda helper: helper.log.append("stock"))


def test_each_chunk_is_captured_once_for_each_slot(running: requested.Pipeline, calls: list[Any]) -> None:
    helper = Helper()
    capture(helper)
    assert helper.log == ["start", "finish"]
    layers, args, options = zip(*calls, strict=True)
    assert [len(of_call) for of_call in layers] == [1, 2] * 4
    assert args[3] == (("second", 1, 0), ("second", 1, 1))
    assert [of_call["pool"] for of_call in options] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [of_call["fp8_enabled"] for of_call in options[:2]] == [(False,), (True, False)]
    for of_call in options:
        assert of_call["_order"] == [1, -1]
        assert of_call["allow_unused_input"]
        assert "_reuse_graph_input_output_buffers" not in of_call  # a W may read them
    second = helper.callables_per_chunk[1][1].cuda_graphs
    assert list(second) == ["2.1", "4.1", "6.1", "8.1"]


def test_a_layer_takes_the_graph_of_its_microbatchs_slot(
    running: requested.Pipeline, calls: list[Any]
) -> None:
    helper = Helper()
    capture(helper)
    layer = helper.callables_per_chunk[1][1]
    steps: Any = choose.runner(running).steps
    plan = steps.training_plans()[0]
    steps.graphs.begin(plan)
    slots = Slots.of(plan.steps)
    for microbatch in range(4):
        # Megatron's own way to choose: the number modulo the length.
        chosen = layer.cuda_graphs[microbatch % len(layer.cuda_graphs)]
        assert chosen == f"{2 * slots.by_unit[3, microbatch] + 2}.1"


def test_a_microbatch_beyond_the_slots_runs_eagerly(running: requested.Pipeline, calls: list[Any]) -> None:
    helper = Helper()
    capture(helper)
    layer = helper.callables_per_chunk[0][0]
    steps: Any = choose.runner(running).steps
    steps.graphs.begin(plan_rank(catalog.build("gpipe", 2, 6), 0))
    found = []
    for layer.current_microbatch in range(6):
        found.append(bool(layer.cuda_graphs))
    assert found == [True, True, True, True, False, False]


def test_a_step_that_has_not_run_has_no_slots(running: requested.Pipeline) -> None:
    choose.runner(running).steps._plans.clear()
    with pytest.raises(RuntimeError, match="raise --cuda-graph-warmup-steps to 1 or more"):
        capture(Helper())


@pytest.fixture
def by_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.nn.Module]]:
    """The chunk of a model that was built for ZB-H1 by a call, which is no longer in force."""
    request = named("zb-h1", 2, 4)
    pipeline = requested.Pipeline(request, source.Source(request, CostModel(Costs.unit)), is_per_model=True)
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(chunk_pipelines, "_chunks", WeakKeyDictionary({model: pipeline}))
    monkeypatch.setattr(choose, "_runners", WeakKeyDictionary())
    yield [model]


def test_capture_follows_the_schedule_of_the_model_that_is_captured(by_call: list[torch.nn.Module]) -> None:
    with pytest.raises(RuntimeError, match="set cuda_graph_warmup_steps to 1 or more"):
        capture(Helper(by_call))
    other = Helper([torch.nn.Linear(1, 1)])
    capture(other)
    assert other.log == ["stock"]


class Sent:
    """Losses that reach another rank; ``log`` has what was sent."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def losses(self, inputs: Any) -> list[float]:
        self.log.append("sent")
        return [float(loss) for loss in inputs.losses]


class Runner(PipelineRunner):
    """Runs steps whose only loss is the number of the step on the device."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(None, None, Sent(log))  # type: ignore[arg-type]
        self.log, self.number = log, torch.zeros(1)

    def __call__(self, **kwargs: Any) -> list[Any]:
        assert not self.delivers_losses
        self.log.append("ran")
        self.number += 1
        self._undelivered[kwargs["forward_only"]] = SimpleNamespace(losses=[self.number])  # type: ignore[assignment]
        return []


@pytest.mark.parametrize("is_by_call", [False, True])
def test_losses_are_sent_after_each_replay(
    monkeypatch: pytest.MonkeyPatch, by_call: list[torch.nn.Module], is_by_call: bool
) -> None:
    log: list[str] = []
    runner = Runner(log)
    choose._runners[by_call[0]] = runner

    class Graph:
        """Counts as the captured step would."""

        def register_generator_state(self, state: Any) -> None:
            pass

        def replay(self) -> None:
            log.append("replayed")
            runner.number += 1

    @contextmanager
    def capture(*args: Any, **kwargs: Any) -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")
        runner.number -= 1  # a capture computes nothing

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(dist, "barrier", lambda *args: None)
    for name in ("get_shared_capture_stream", "get_graph_pool"):
        monkeypatch.setattr(full_cuda_graph, name, lambda *args: None)
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
    for name in ("curr_iteration", "cuda_graph", "result"):
        fresh = {"training": 0 if name == "curr_iteration" else None}
        monkeypatch.setattr(FullCudaGraphWrapper, name, {**fresh, "validation": fresh["training"]})
    step = choose.StepsByModel(len) if is_by_call else runner
    wrapper = FullCudaGraphWrapper(step, cuda_graph_warmup_steps=1)
    given = {"data_iterator": None, "model": by_call, "num_microbatches": 1, "seq_length": 1}
    losses = [wrapper(**given, forward_only=False) for _ in range(3)]
    assert losses == [[1.0], [2.0], [3.0]]
    assert log == ["ran", "sent", "begin", "ran", "end", "replayed", "sent", "replayed", "sent"]


def test_other_functions_are_wrapped_as_by_megatron() -> None:
    step = cuda_graphs.send_losses_after_replay(lambda self, **kwargs: "stock")
    wrapper = SimpleNamespace(forward_backward_func=len)
    assert step(wrapper, model=[], forward_only=True) == "stock"
