"""The executor on plain torch stages: the gradients of one process, under every family."""

import functools
import math
import os
import signal
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.features.offload.runtime.host_buffers import Completion, HostBuffers, Timed, Transfer
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.features.pairs.runtime import PairRunner
from megatron_pp_ext.runtime import plan
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank, print_rank_0
from megatron_pp_ext.runtime.recorder import StepRecorder
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule, together
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import plain_stages
from tests.support.copy_engines import OnThread, Threads
from tests.support.module_stage import ModuleStage
from tests.support.offloaded import everything, half, with_offloaded
from tests.support.ranks import RankError, run_ranks
from tests.support.tiers import first


def run_schedule(rank: int, schedule: Schedule, engines: Threads | None = None) -> dict:
    """Run one step and tell the gradients, the losses and the peak of this rank."""
    engines = engines or Threads()
    away = OffloadedActivations(HostBuffers(math.inf), engines, smallest=1)
    last = schedule.placement.stages - 1
    stages = {
        number: plain_stages.make_stage(number, last + 1) for number in schedule.placement.stages_of(rank)
    }
    channels = plain_stages.make_channels(schedule.ranks)
    recorder = StepRecorder(p for stage in stages.values() for p in stage.module.parameters())
    with recorder.step():
        execute(plan_rank(schedule, rank), Rank(stages, channels, recorder, parts=[away]))
    return {
        "copies": Counter(way for way, _ in engines.log),
        "gradients": {n: [p.grad for p in s.module.parameters()] for n, s in stages.items()},
        "losses": stages[last].losses if last in stages else {},
        "order": [event.action for event in recorder.record.events],
        "peak": recorder.record.peak_microbatches,
        "bytes": recorder.record.peak_bytes,
        "left": (len(STORE), recorder.meter.live_bytes),
    }


SAVED = 1 << 16
ORDERS = [(name, False) for name in catalog.NAMES]
ORDERS += [(name, True) for name, entry in catalog.ENTRIES.items() if entry.make_paired]


@functools.cache
def results_of(ranks: int, microbatches: int) -> dict[tuple[str, bool], tuple[dict, ...]]:
    """Return what the ranks tell under every order."""
    schedules = [catalog.build(name, ranks, microbatches, paired=paired) for name, paired in ORDERS]
    return dict(zip(ORDERS, plain_stages.on_ranks(run_schedule, schedules), strict=True))


def assert_equals_one_process(schedule: Schedule, results: Sequence[dict]) -> None:
    expected, losses = plain_stages.in_one_process(schedule.placement.stages, schedule.microbatches)
    assert {number: value for result in results for number, value in result["losses"].items()} == losses
    for result in results:
        assert result["left"] == (0, 0)
        for stage, gradients in result["gradients"].items():
            assert all(map(torch.equal, gradients, expected[stage])), f"stage {stage}"


@pytest.mark.parametrize(("name", "paired"), ORDERS)
@pytest.mark.parametrize(("ranks", "microbatches"), first(3, [(2, 1), (2, 5), (3, 3), (4, 9)]))
def test_gradients_are_those_of_one_process_and_the_peak_is_the_simulated_one(
    name: str, paired: bool, ranks: int, microbatches: int
) -> None:
    schedule = catalog.build(name, ranks, microbatches, paired=paired)
    results = results_of(ranks, microbatches)[name, paired]
    assert_equals_one_process(schedule, results)
    peaks = simulate(schedule, Costs.unit(schedule.placement)).peak_activations
    assert tuple(result["peak"] for result in results) == peaks
    assert tuple(tuple(result["order"]) for result in results) == schedule.orders


@pytest.mark.parametrize(
    ("name", "paired", "leaves"),
    first(
        2,
        [
            ("v-half", False, half),
            ("zb-h1", False, everything),
            *((*order, leaves) for order in ORDERS for leaves in (half, everything)),
        ],
    ),
)
def test_gradients_are_those_of_one_process_where_activations_wait_on_the_host(name, paired, leaves):
    schedule = with_offloaded(catalog.build(name, 3, 5, paired=paired), leaves)
    (results,) = plain_stages.on_ranks(run_schedule, [schedule])
    assert_equals_one_process(schedule, results)
    for rank, result in enumerate(results):
        count = sum(schedule.placement.rank_of(stage) == rank for stage, _ in schedule.copies.reloads)
        assert result["copies"] == {"out": count, "back": count}


class Known(torch.nn.Module):
    """Keeps ``SAVED`` bytes for its backward, and little beside."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1, dtype=torch.double))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + (input.mean() + self.shift).expand(SAVED // 8).exp().mean()


@pytest.mark.parametrize(
    ("name", "paired"), first(1, [("v-half", False), *(order for order in ORDERS if order[0] != "v-half")])
)
@pytest.mark.parametrize("leaves", first(1, [half, everything]))
def test_peaks_are_those_of_the_plan(name, paired, leaves, monkeypatch):
    monkeypatch.setattr(plain_stages, "make_module", lambda stage: Known())
    schedule = with_offloaded(catalog.build(name, 3, 7, paired=paired), leaves)
    (results,) = plain_stages.on_ranks(run_schedule, [schedule])
    for rank, result in enumerate(results):
        assert result["bytes"] // SAVED == most_here(schedule, rank)


def most_here(schedule: Schedule, rank: int) -> int:
    """The most stages' activations of a microbatch that the plan has on the device at one time."""
    order = list(together(schedule.orders[rank], schedule.paired))
    given_up = schedule.copies.freed_before(order)
    brought_back = schedule.copies.reloaded_before(schedule.orders[rank])
    here, most = 0, 0
    for actions in order:
        here += len(brought_back.get(actions[0], ())) - len(given_up.get(actions[0], ()))
        for action in actions:
            most = max(most, here := here + (action.kind is Kind.F))
            here -= action.kind in (Kind.I, Kind.B)
    return most


def test_a_rank_that_dies_ends_the_others(monkeypatch):
    schedule = catalog.build("zb-h1", 3, 6)
    with pytest.raises(RankError, match="died on purpose"):
        run_ranks(_die_in_the_middle, 3, schedule)


def _die_in_the_middle(rank: int, schedule: Schedule) -> None:
    if rank == 1:

        class Dying(ModuleStage):
            def backward_weight(self, microbatch: int) -> None:
                if microbatch == 2:
                    raise SystemExit("died on purpose")
                super().backward_weight(microbatch)

        plain_stages.ModuleStage = Dying  # type: ignore[misc]
    dist.init_process_group("gloo")
    run_schedule(rank, schedule)


def test_a_rank_that_is_killed_in_the_middle_of_a_copy_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 failed"):
        run_ranks(_killed_while_copying, 3, with_offloaded(catalog.build("v-half", 3, 6)))


def _killed_while_copying(rank: int, schedule: Schedule) -> None:
    class Killed(Threads):
        def to_host(
            self, transfers: Sequence[Transfer], after: Iterable[Completion], timed: Timed
        ) -> OnThread:
            launched = super().to_host(transfers, after, timed)
            if rank == 1 and len(self.log) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return launched

    dist.init_process_group("gloo")
    run_schedule(rank, schedule, Killed(seconds_per_byte=1e-4))


def test_steps_use_the_same_memory_of_the_host() -> None:
    assert run_ranks(_take_steps, 2, with_offloaded(catalog.build("zb-h1", 2, 5))) == [None, None]


def _take_steps(rank: int, schedule: Schedule) -> None:
    dist.init_process_group("gloo")
    stage = plain_stages.make_stage(rank, 2)
    away = OffloadedActivations(HostBuffers(math.inf), Threads(), smallest=1)
    pinned = set()
    for _ in range(4):
        channels = plain_stages.make_channels(2)
        execute(plan_rank(schedule, rank), Rank({rank: stage}, channels, parts=[away]))
        assert away.buffers.used_bytes == 0
        pinned.add(away.buffers.pinned_bytes)
    (of_all_steps,) = pinned
    assert 0 < of_all_steps < away.offloaded_bytes / 4, "buffers are used again within a step, too"


class Watched:
    """Channels, a stage and a recorder in one: what is taken when, and what is alive meanwhile."""

    def __init__(self, produces: bool = True) -> None:
        self.is_computing, self.produces = False, produces
        self.taken: list[weakref.ref] = []
        self.produced: list[weakref.ref] = []

    def post(self, peer, message, repeats) -> None:
        self._require_nothing_taken()

    def receive(self, peer, message) -> torch.Tensor:
        assert not self.is_computing, "waiting for a message is no computation"
        arrived = torch.ones(2)
        self.taken.append(weakref.ref(arrived))
        return arrived

    def send(self, peer, message, tensor, repeats) -> None:
        self._require_nothing_taken()

    def _require_nothing_taken(self) -> None:
        """Between two actions the input of the first makes room for messages."""
        assert not self.is_computing
        assert not any(one() is not None for one in self.taken)

    def close(self) -> None:
        assert not any(one() is not None for one in self.taken + self.produced)

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        self.is_computing = True
        yield
        self.is_computing = False

    def _compute(self, received: torch.Tensor | None) -> torch.Tensor | None:
        alive = [one() for one in self.taken + self.produced if one() is not None]
        assert [one is received for one in alive] == [True] * (received is not None), "kept for too long"
        if not self.produces:
            return None
        made = torch.ones(2)
        self.produced.append(weakref.ref(made))
        return made

    def forward(self, microbatch, activation) -> torch.Tensor | None:
        return self._compute(activation)

    def backward_input(self, microbatch, gradient) -> torch.Tensor | None:
        return self._compute(gradient)

    def backward_weight(self, microbatch) -> None:
        self._compute(None)
        if self.produced:
            self.produced.pop()


def test_a_message_lives_as_long_as_its_action() -> None:
    """The executor holds no tensor of one action while it runs another, nor counts a wait as work."""
    watched = Watched()
    execute(plan_rank(catalog.build("zb-h1", 3, 4), 1), Rank({1: watched}, watched, watched))
    assert len(watched.taken) == 8


def test_a_stage_that_produces_nothing_is_named() -> None:
    watched = Watched(produces=False)
    plan = plan_rank(catalog.build("zb-h1", 3, 4), 1)
    with pytest.raises(RuntimeError, match=r"stage 1 produced nothing for .*receiver=2, microbatch=0"):
        execute(plan, Rank({1: watched}, watched))


@pytest.mark.parametrize("runs_pairs", [False, True])
def test_torchs_profiler_shows_every_action_by_its_name(runs_pairs: bool) -> None:
    schedule = catalog.build("dualpipe-v", 2, 4, paired=True)
    tensor = torch.zeros(1)
    channels = MagicMock()
    channels.receive.return_value = tensor
    names = ("forward", "backward", "backward_input", "backward_weight")
    stage = SimpleNamespace(**dict.fromkeys(names, lambda *about: tensor))
    stages = dict.fromkeys(schedule.placement.stages_of(0), stage)
    pairs = [PairRunner(lambda *about: (tensor, tensor))] if runs_pairs else []
    rank, planned = Rank(stages, channels, parts=pairs), plan.plan_rank(schedule, 0)
    execute(planned, rank)  # without a profiler there is nothing to name
    with torch.profiler.profile() as profile:
        execute(planned, rank)
    order = [str(action) for action in schedule.orders[0]]
    shown = [name for event in profile.events() for name in event.name.split(";")]
    assert [name for name in shown if name in order] == order


@pytest.mark.parametrize(("rank", "said"), [(None, "a line\n"), (0, "a line\n"), (1, "")])
def test_the_first_rank_speaks_and_a_process_that_is_none(rank, said, monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    print_rank_0("a line")
    assert capsys.readouterr().out == said
