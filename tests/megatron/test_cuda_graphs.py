"""CUDA graphs under a schedule: the order in which they are captured, and losses after each replay.

No graph is captured here: dummies stand for those of torch.cuda and of Transformer Engine.
"""

from collections import Counter
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
from megatron_pp_ext.megatron.runners.transport import ProcessGroups
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import CostModel, Costs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "v-half", "v-zb", "dualpipe-v"])
def test_an_order_has_each_chunks_microbatches_in_turn(name: str, rank: int) -> None:
    """Transformer Engine counts forwards and backwards of a chunk by themselves, and pairs them by number."""
    schedule = catalog.build(name, 2, 4)
    plan = plan_rank(schedule, rank)
    order = cuda_graphs.order_of_chunks(plan, schedule.placement)
    chunks = schedule.placement.chunks
    assert Counter(order) == {sign * chunk: 4 for chunk in range(1, chunks + 1) for sign in (1, -1)}
    counted: Counter[tuple[int, bool]] = Counter()
    computed = [action for action in plan.actions if action.kind is not Kind.W]
    for entry, action in zip(order, computed, strict=True):
        assert counted[abs(entry), entry > 0] == action.microbatch
        counted[abs(entry), entry > 0] += 1


def test_the_order_of_1f1b_is_megatrons() -> None:
    schedule = catalog.build("1f1b", 2, 4)
    theirs = megatrons.convert_schedule_table_to_order(1, 1, [(microbatch, 0) for microbatch in range(4)])
    assert cuda_graphs.order_of_chunks(plan_rank(schedule, 0), schedule.placement) == theirs


def test_layers_of_a_pair_alternate() -> None:
    """A rank with chunks of one and of two graphed layers."""
    schedule = catalog.build("interleaved", 2, 4, paired=True)
    plan = plan_rank(schedule, 0)
    entries = list(cuda_graphs.order_of_layers(plan, schedule.placement, [1, 2]))
    order = [layer for layer, _ in entries]
    assert Counter(order) == {sign * layer: 4 for layer in (1, 2, 3) for sign in (1, -1)}
    assert {layer: tuple(place) for layer, place in entries if place} == {1: (0, 0), 2: (1, 0), 3: (1, 1)}
    at = 0
    for step in plan.steps:
        length = sum(1 if plan_chunk(action) == 0 else 2 for action in step)
        found, at = order[at : at + length], at + length
        if len(step) == 2:
            assert found[0] > 0 > found[1]


def plan_chunk(action: Any) -> int:
    """The chunk of a stage in a loop of two ranks."""
    return int(action.stage // 2)


@pytest.fixture
def running() -> Iterator[requested.Pipeline]:
    """ZB-H1 on two ranks, whose first step has run on rank 0."""
    request = named("zb-h1", 2, 4)
    pipeline = requested.Pipeline(request, source.Source(request, CostModel(Costs.unit)))
    requested.activate(pipeline)
    steps: Any = choose.runner(pipeline).steps
    steps._plans[4, False, None] = plan_rank(catalog.build("zb-h1", 2, 4), 0)
    yield pipeline
    requested.activate(None)


def test_capture_follows_the_running_schedule(running: requested.Pipeline) -> None:
    table = [(microbatch, 0) for microbatch in range(4)]
    assert megatrons.convert_schedule_table_to_order(3, 1, table) == [1, 1, -1, 1, -1, 1, -1, -1]
    requested.activate(None)
    assert megatrons.convert_schedule_table_to_order(3, 1, table) == [1, 1, 1, 1, -1, -1, -1, -1]


def test_graphs_share_no_outputs_where_the_backward_is_split(running: requested.Pipeline) -> None:
    options = {"_order": [], "_reuse_graph_input_output_buffers": True}
    hooked = cuda_graphs.keep_what_a_later_half_reads(lambda helper: ([], dict(options)))
    assert hooked(SimpleNamespace(model=())) == ([], {"_order": []})


def test_a_step_that_has_not_run_has_no_order(running: requested.Pipeline) -> None:
    choose.runner(running).steps._plans.clear()
    with pytest.raises(RuntimeError, match="raise --cuda-graph-warmup-steps to 1 or more"):
        megatrons.convert_schedule_table_to_order(1, 1, [])


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
    def capture(helper: Any) -> Any:
        return megatrons.convert_schedule_table_to_order(3, 1, [(one, 0) for one in range(4)]), {}

    hooked = cuda_graphs.keep_what_a_later_half_reads(capture)
    helper = SimpleNamespace(model=by_call)
    with pytest.raises(RuntimeError, match="set cuda_graph_warmup_steps to 1 or more"):
        hooked(helper)
    pipeline = chunk_pipelines.of_model(by_call)
    choose._runners[by_call[0]] = choose.put_together(pipeline, ProcessGroups(pipeline.settings))
    steps: Any = choose._runners[by_call[0]].steps
    steps._plans[4, False, None] = plan_rank(catalog.build("zb-h1", 2, 4), 0)
    assert hooked(helper) == ([1, 1, -1, 1, -1, 1, -1, -1], {})
    assert hooked(SimpleNamespace(model=[torch.nn.Linear(1, 1)])) == ([1, 1, 1, 1, -1, -1, -1, -1], {})


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
