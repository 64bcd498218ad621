"""What Megatron may request of the forward-backward function, and what runners do around the microbatches."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.timers import Timers

from megatron_pp_ext.compiler import source
from megatron_pp_ext.compiler.make import Made
from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import chunk_pipelines, free_memory
from megatron_pp_ext.megatron.requested import Settings
from megatron_pp_ext.megatron.runners import choose, flushed, pipeline_runner, transport
from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.costs import CostModel, Costs
from tests.support.ranks import run_ranks


@pytest.fixture
def pipeline():
    chosen = requested.Pipeline(
        named("1f1b", 2, 4), source.Source(named("1f1b", 2, 4), CostModel(Costs.unit))
    )
    requested.activate(chosen)
    yield chosen
    requested.activate(None)


def contract(**changed):
    nothing = dict.fromkeys(("forward_step_func", "data_iterator", "model"))
    return {**nothing, "num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1, **changed}


def test_distillation_is_refused(pipeline):
    runner = stock_schedules.get_forward_backward_func()
    assert isinstance(runner.steps, flushed.FlushedSteps)
    with pytest.raises(ValueError, match="do not support modelopt's distillation"):
        runner(**contract(adjust_tensor_shapes_fn=lambda *shapes: shapes))


def test_several_modules_are_refused(pipeline):
    modules = MultiModuleProcessGroupCollection.__new__(MultiModuleProcessGroupCollection)
    with pytest.raises(ValueError, match="do not support MIMO"):
        stock_schedules.get_forward_backward_func(2, None, modules)
    with pytest.raises(ValueError, match="do not support MIMO"):
        stock_schedules.get_forward_backward_func()(**contract(pg_collection=modules))


def compare(rank: int) -> dict[str, str]:
    """Return how ranks are refused; 0 and 1 are one pipeline, 2 and 3 another, of which two share experts."""
    dist.init_process_group("gloo")

    def group(*members):
        made = [dist.new_group(ranks) for ranks in members]
        return next(one for one, ranks in zip(made, members, strict=True) if rank in ranks)

    alone = SimpleNamespace(pp=group([0, 1], [2, 3]), tp=None)
    sharing = SimpleNamespace(pp=alone.pp, ep=group([0, 2], [1, 3]))

    def refused(groups, in_job=False, orders=("1f1b",) * 4, counts=(4,) * 4) -> str:
        schedule = replace(catalog.build(orders[rank], 2, counts[rank]), name="mine")
        try:
            flushed.require_same_schedule(schedule, groups, in_job)
        except RuntimeError as error:
            return str(error)
        return ""

    others = ("1f1b", "1f1b", "gpipe", "gpipe")
    return {
        "same": refused(sharing, in_job=True),
        "other replicas": refused(alone, orders=others),
        "other replicas first": refused(alone, in_job=True, orders=others),
        "other counts": refused(alone, in_job=True, counts=(4, 4, 3, 3)),
        "counts of experts": refused(sharing, in_job=True, counts=(4, 4, 3, 3)),
        "counts in a pipeline": refused(alone, counts=(4, 3, 4, 4)),
        "one rank": refused(sharing, orders=("1f1b", "1f1b", "1f1b", "gpipe")),
    }


def test_ranks_that_meet_in_a_step_run_one_schedule() -> None:
    """Replicas may differ in their number of microbatches, unless they share experts."""
    built = "of this job built different schedules for 'mine'"
    for rank, found in enumerate(run_ranks(compare, 4)):
        assert [found.pop(name) for name in ("same", "other replicas", "other counts")] == [""] * 3
        assert f"ranks 0 and 2 {built}" in found.pop("other replicas first")
        assert "rank 0 has 4 microbatches in this step and rank 2 has 3" in found.pop("counts of experts")
        where = "rank 0 has 4 microbatches in this step and rank 1 has 3; give all ranks of a pipeline"
        assert found.pop("counts in a pipeline").startswith(where if rank < 2 else "")
        assert f"ranks 0 and 3 {built}" in found.pop("one rank")


@pytest.mark.parametrize(("given", "words"), [(iter([]), "one iterator"), ([None] * 3, "a list of 3")])
def test_each_chunk_has_a_data_iterator(step, given, words) -> None:
    runner = Noting()
    with pytest.raises(ValueError, match=f"^data_iterator is {words}, and this model has 2 chunks on a rank"):
        runner(**contract(model=[torch.nn.Linear(1, 1)] * 2, data_iterator=given))
    assert runner.done == []


def fail(rank: int) -> list[str]:
    """Return how a step begins, one after it that fails, and one after that."""
    dist.init_process_group("gloo")
    groups = transport.ProcessGroups(Settings())
    inputs = SimpleNamespace(
        group=dist.group.WORLD,
        shape=(1,),
        shapes=(),
        announced={},
        has_one_shape=False,
        config=SimpleNamespace(pipeline_dtype=torch.float),
    )
    found = []
    for is_ended in (True, False, False):
        try:
            channels = groups.channels(inputs)
            if is_ended and rank == 0:
                channels.send(1, "message", torch.ones(1))
            elif is_ended:
                channels.post(0, "message")
                channels.receive(0, "message")
            if is_ended:
                channels.close()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_no_step_follows_one_that_failed() -> None:
    for first, second, third in run_ranks(fail, 2):
        assert (first, second) == ("", "")
        assert third.startswith("no step can follow one that failed: its messages may be on their way")


class Noting(PipelineRunner):
    """A runner whose parts do nothing but what a test asks for, and note what is done around them."""

    def __init__(self, act=lambda inputs: None) -> None:
        super().__init__(self, SimpleNamespace(step=self._recorded, actions=self._recorded), self)
        self.act, self.done, self.inputs = act, [], []

    def run(self, inputs, recorder) -> None:
        self.inputs.append(inputs)
        self.done.append("run")
        self.act(inputs)

    def _recorded(self, *about):
        return nullcontext()

    def tokens(self, inputs) -> torch.Tensor:
        return inputs.tokens

    def losses(self, inputs) -> list:
        self.done.append("losses")
        return ["loss"]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch):
    """Run a step of a ``Noting`` runner with settings of the model's config; the runner."""
    groups = SimpleNamespace(
        cp=SimpleNamespace(size=lambda: 3), tp=None, pp=SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    )
    monkeypatch.setattr(pipeline_runner.stock_schedules, "get_tensor_shapes", lambda **_: [(1,)])
    monkeypatch.setattr(pipeline_runner, "require_alike", lambda model: None)

    def run(runner: Noting, forward_only: bool = False, force: bool = False, **settings) -> Noting:
        finalize = runner.finalize = []

        def finalize_model_grads(model, tokens, **about) -> None:
            runner.done.append("finalize")
            finalize.append((tokens if tokens is None else tokens.item(), about["force_all_reduce"]))

        reduced = runner.reduced = []
        defaults = {
            "finalize_model_grads_func": finalize_model_grads,
            "grad_sync_func": lambda parameters: reduced.append(parameters),
            **dict.fromkeys(("no_sync_func", "param_sync_func", "timers", "calculate_per_token_loss")),
            "barrier_with_L1_time": True,
            "mtp_standalone": False,
            "variable_seq_lengths": False,
        }
        config = SimpleNamespace(**{**defaults, **settings})
        monkeypatch.setattr(pipeline_runner, "get_model_config", lambda model: config)
        about = {"pg_collection": groups, "forward_only": forward_only, "force_all_reduce": force}
        assert runner(**contract(model=torch.nn.Linear(1, 1), **about)) == ["loss"]
        return runner

    return run


def test_gradients_are_finalized_as_megatron_asks(step) -> None:
    """After the actions and before the losses; with a forced all-reduce nothing is reduced before."""

    def add_tokens(inputs) -> None:
        inputs.tokens += 12

    plain = step(Noting(add_tokens))
    assert (plain.done, plain.finalize) == (["run", "finalize", "losses"], [(None, False)])
    assert plain.inputs[0].data_parallel._reduce is not None
    by_token = step(Noting(add_tokens), force=True, calculate_per_token_loss=True)
    assert by_token.finalize == [(12, True)]
    assert by_token.inputs[0].data_parallel._reduce is None
    assert step(Noting(), forward_only=True).done == ["run", "losses"]
    assert step(Noting(), finalize_model_grads_func=None).done == ["run", "losses"]


def test_an_evaluation_is_no_training_step(step) -> None:
    """Optimizers allocate their state in the first training step, which ``auto`` waits for."""
    runner = step(step(Noting(), forward_only=True), forward_only=True)
    assert runner._training_steps == 0
    assert step(runner)._training_steps == 1


def test_weight_gradients_that_are_left_end_the_step(step) -> None:
    def forget(inputs) -> None:
        with STORE.collecting(Owner(0, 0)):
            STORE.defer(lambda: None)

    with pytest.raises(RuntimeError, match="1 weight gradients were left at the end of the step"):
        step(Noting(forget))
    STORE.run(Owner(0, 0))


def test_the_timer_waits_for_all_ranks(step) -> None:
    """As stock's does: a rank that is early would otherwise count its wait for the others."""
    started = []
    timer = SimpleNamespace(start=lambda barrier: started.append(barrier), stop=lambda: None)
    for waits in (True, False):
        step(Noting(), timers=lambda name, log_level=None: timer, barrier_with_L1_time=waits)
    assert started == [True, False]


def test_no_timer_runs_on_after_a_step_that_failed(step) -> None:
    """Megatron's timers cannot be started twice; stock's forward_step leaves its own running."""
    timers = Timers(log_level=2, log_option="max")

    def fail(inputs) -> None:
        inputs.config.timers("forward-compute", log_level=2).start()
        raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            step(Noting(fail), timers=timers, barrier_with_L1_time=False)
    step(Noting(), timers=timers, barrier_with_L1_time=False)


def test_a_step_knows_its_context_parallel_size(step) -> None:
    assert step(Noting()).inputs[0].cp_size == 3


def test_auto_asks_for_free_memory_from_the_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once.  Evaluations have an order of their own; each number has a schedule, built once."""
    built, measured = [], []

    def make(request: Request, costs):
        built.append((request.microbatches, request.free))
        return Made(catalog.build("1f1b", 2, request.microbatches))

    monkeypatch.setattr(flushed, "require_same_schedule", lambda schedule, groups, in_job: None)
    monkeypatch.setattr(free_memory, "free_bytes_by_rank", lambda: measured.append(1) or [1.0, 1.0])
    group = SimpleNamespace(rank=lambda: 0)
    monkeypatch.setattr(source, "make", make)
    pipeline = requested.Pipeline(
        named("auto", 2, 4), source.Source(named("auto", 2, 4), CostModel(Costs.unit))
    )
    monkeypatch.setattr(flushed, "model_options", lambda *model: ())
    steps = choose.runner(pipeline).steps

    def plan(microbatches: int, forward_only: bool = False, training_steps: int = 0):
        about = {"forward_only": forward_only, "training_steps": training_steps, "model": [], "groups": None}
        return steps.plan(SimpleNamespace(group=group, microbatches=microbatches, **about))

    first, evaluation = plan(4), plan(4, forward_only=True)
    assert {action.kind for action in evaluation.actions} == {Kind.F}
    assert {action.kind for action in first.actions} > {Kind.F}
    assert plan(4) is first
    for microbatches in (4, 4, 6, 4):
        plan(microbatches, training_steps=1)
    assert built == [(4, None), (4, (1.0, 1.0)), (6, (1.0, 1.0))]
    assert len(measured) == 1, "replicas may come to later numbers of microbatches alone"


def test_a_model_for_stock_s_schedule_keeps_it_whatever_is_installed(pipeline) -> None:
    chunk = torch.nn.Linear(1, 1)
    chunk_pipelines.remember(chunk, None)
    assert chunk_pipelines.of_model([chunk]) is None
    assert chunk_pipelines.of_model([torch.nn.Linear(1, 1)]) is pipeline
