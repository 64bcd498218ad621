"""What a step asks of data parallelism, and when, beside chunks that only note it."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.megatron.core import data_parallel
from megatron_pp_ext.megatron.core.data_parallel import DataParallel, LastActions, defer_weights
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import Placement, linear
from tests.support import training
from tests.support.tiers import first


class Job:
    """Chunks, and the three functions that the trainer puts into the model's config."""

    def __init__(self, chunks: int, aligned: bool = True) -> None:
        self.done: list[str] = []
        self.uncounted: set[int] = set()
        self.model = [torch.nn.Linear(1, 1) for _ in range(chunks)]
        self.config = SimpleNamespace(
            no_sync_func=[self._no_sync(number) for number in range(chunks)],
            grad_sync_func=[self._note("reduce", number) for number in range(chunks)] if aligned else None,
            param_sync_func=[self._note("gather", number) for number in range(chunks)],
        )

    def _note(self, what: str, number: int):
        def note(parameters) -> None:
            assert [*map(id, parameters)] == [*map(id, self.model[number].parameters())]
            self.done.append(f"{what} {number}")

        return note

    def _no_sync(self, number: int):
        @contextmanager
        def no_sync() -> Iterator[None]:
            self.uncounted.add(number)
            try:
                yield
            finally:
                self.uncounted.remove(number)

        return no_sync

    def parallel(self, forward_only: bool = False, force_all_reduce: bool = False) -> DataParallel:
        return DataParallel(self.model, self.config, forward_only, force_all_reduce)


LAST = LastActions(Action(0, Kind.I, 3), Action(0, Kind.W, 3))
ACTIONS = [Action(0, kind, number) for number in (2, 3) for kind in (Kind.I, Kind.W)]


def test_weights_are_gathered_a_chunk_ahead() -> None:
    """Two before the first forward, each further one as the chunk before it begins; none twice."""
    job = Job(4)
    parallel = job.parallel()
    with parallel.step():
        assert job.done == ["gather 0", "gather 1"]
        for chunk in range(4):
            parallel.first_forward(chunk)
            assert len(job.done) == min(4, max(2, chunk + 2))
    assert job.done == [f"gather {chunk}" for chunk in range(4)]


def test_an_evaluation_gathers_nothing() -> None:
    job = Job(2)
    parallel = job.parallel(forward_only=True)
    with parallel.step():
        parallel.first_forward(0)
        parallel.first_forward(1)
    assert job.done == []


def test_a_chunk_is_reduced_after_its_last_weight_gradient() -> None:
    job = Job(1)
    parallel = job.parallel()
    seen = []
    with parallel.step():
        job.done.clear()
        for action in ACTIONS:
            with parallel.backward(0, action, LAST):
                assert not job.done and job.uncounted == {0}, (
                    "a whole chunk is reduced, bucket by bucket is not"
                )
            seen.append(list(job.done))
    assert seen == [[], [], [], ["reduce 0"]]


def test_a_forced_reduction_waits_for_the_end() -> None:
    job = Job(1)
    parallel = job.parallel(force_all_reduce=True)
    with parallel.step():
        for action in ACTIONS:
            with parallel.backward(0, action, LAST):
                pass
    assert job.done == ["gather 0"]


def test_a_chunk_counts_in_its_last_actions_alone() -> None:
    """Bucket by bucket: what arrives in any other action is not the last of it.  After an error all count."""
    job = Job(2, aligned=False)
    parallel = job.parallel()
    counted = []
    with pytest.raises(ArithmeticError), parallel.step():
        assert job.uncounted == {0, 1}
        for action in [*ACTIONS, Action(0, Kind.I, 4)]:
            with parallel.backward(0, action, LAST):
                counted.append(0 not in job.uncounted)
            assert job.uncounted == {0, 1}
        raise ArithmeticError
    assert counted == [False, False, True, True, False]
    assert job.uncounted == set()


def test_a_weight_counts_after_its_last_product() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    counted: list[int] = []
    weight.count = lambda: counted.append(len(done))
    done: list[int] = []

    def product(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        done.append(number)
        return []

    work = [defer_weights([weight], functools.partial(product, number)) for number in range(2)]
    assert data_parallel.is_deferred(weight)
    for one in work:
        one()
    assert (done, counted) == ([0, 1], [2])
    assert not data_parallel.is_deferred(weight)


@pytest.mark.parametrize("backwards", [1, 2])
def test_uses_in_one_backward_are_summed_as_autograd_does(backwards: int) -> None:
    """In the weight's precision, in which the smaller one is lost; two backwards add to what is kept."""
    large, small = 1.0, 2.0**-9
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(1)
    work: list[Callable[[], None]] = []

    def use(number: float) -> torch.Tensor:
        output = torch.ones(1, requires_grad=True) * 1
        product = torch.full((1,), number, dtype=torch.bfloat16)
        output.register_hook(
            lambda gradient: work.append(defer_weights([weight], lambda: [(weight, product)]))
        )
        return output

    uses = [use(large), use(small)]
    for some in [uses] if backwards == 1 else [[one] for one in uses]:
        torch.autograd.backward(some)
    for one in work:
        one()
    assert weight.main_grad.item() == (large if backwards == 1 else large + small)


def test_gradients_are_added_where_they_are_kept() -> None:
    plain, buffered = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    buffered.main_grad = torch.zeros(2, dtype=torch.double)
    for parameter in (plain, buffered):
        for value in (1.0, 2.0):
            data_parallel.add_gradient(parameter, torch.full((2,), value))
    assert plain.grad is not None and plain.grad.tolist() == [3.0, 3.0]
    assert buffered.grad is None and buffered.main_grad.tolist() == [3.0, 3.0]


def test_a_gradient_has_the_dtype_of_its_weight() -> None:
    """Under autocast a product of weights in fp32 is in bf16, and autograd would cast what it brings."""
    weight = torch.nn.Parameter(torch.zeros(3))
    for _ in range(2):
        data_parallel.add_gradient(weight, torch.ones(3, dtype=torch.bfloat16))
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.tolist()) == (torch.float32, [2.0] * 3)


LAYERS, RANKS, STEPS = 4, 2, 4
JOB = (
    f"--pipeline-model-parallel-size {RANKS} --num-layers {LAYERS} --train-iters {STEPS} --clip-grad 0 "
    "--use-distributed-optimizer --untie-embeddings-and-output-weights"
)
SAVED = (2, 4)
"""Steps: in the first Megatron learns how often each parameter counts, which it expects in the second."""


def saved(folder: Path, placement: Placement, *flags: str) -> dict[tuple[int, str], torch.Tensor]:
    """The gradients of a job of two replicas, by step and global name."""
    where = ("--save", str(folder), "--save-interval", "100", "--save-wgrads-interval", "2")
    training.train(2 * RANKS, [*JOB.split(), *flags, *where])
    found = {}
    for step in SAVED:
        for rank in range(RANKS):
            chunks = torch.load(folder / "wgrads" / f"iter_{step:07}" / f"mp_rank_00_{rank:03}.pth")
            for chunk, gradients in enumerate(chunks.values()):
                first = placement.stage_of(rank, chunk) * LAYERS // placement.stages
                found |= {(step, global_name(name, first)): gradient for name, gradient in gradients.items()}
    return found


def global_name(name: str, first: int) -> str:
    return re.sub(r"layers\.(\d+)", lambda layer: f"layers.{first + int(layer[1])}", name)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    first(1, [("v-half", ()), ("v-zb", ("--overlap-param-gather", "--no-align-grad-reduce"))]),
)
def test_saved_gradients_are_stock_s(schedule: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Stock's own are whole without --overlap-grad-reduce."""
    theirs = saved(tmp_path / "stock", linear(RANKS))
    placement = catalog.build(schedule, RANKS, 8).placement
    overlap = ("--pipeline-schedule", schedule, "--overlap-grad-reduce", *flags)
    ours = saved(tmp_path / "ours", placement, *overlap)
    assert ours.keys() == theirs.keys()
    assert [name for name, gradient in ours.items() if not torch.equal(gradient, theirs[name])] == []
