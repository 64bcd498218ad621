"""Message buffers as they are counted in a simulation, against those that channels really hold."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.compiler.limits import InfeasibleLimit, least_limits
from megatron_pp_ext.compiler.search.problem import problem_of
from megatron_pp_ext.compiler.search.proposals import one_at_a_time
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Orders, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message, outgoing_message
from megatron_pp_ext.schedule.placement import Placement, linear, loop, v, wave
from megatron_pp_ext.schedule.simulate import peak_messages, simulate
from tests.support import rounding
from tests.support.ranks import run_ranks
from tests.support.receives import posted_receives

NOISE = 1 + rounding.COMPILED
WATCHED = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h2", "1f1b-v", "v-half", "v-zb", "dualpipe-v")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield


class _Late:
    """A send that does not report that it is done before somebody waits for it, as on the slowest wire."""

    def __init__(self, work: dist.Work) -> None:
        self.wait = work.wait

    def is_completed(self) -> bool:
        return False


class _Watched(Channels):
    """Channels that count the most buffers they have held: of receives, of sends, and of both together.

    A gradient that was taken counts until the next message or receive, since its backward needs it.
    """

    is_late = False
    taken = received = sent = most = 0

    def _note(self) -> None:
        self.received = max(self.received, len(self._posted) + self.taken)
        self.sent = max(self.sent, len(self._sending))
        self.most = max(self.most, len(self._posted) + self.taken + len(self._sending))

    def post(self, peer: int, message: Message, repeats: bool = False) -> None:
        self.taken = 0
        super().post(peer, message, repeats)
        self._note()

    def receive(self, peer: int, message: Message) -> torch.Tensor:
        tensor = super().receive(peer, message)
        self.taken = int(message.sender > message.receiver)
        self._note()
        return tensor

    def _send(self, peer: int, *tensors: torch.Tensor) -> None:
        self.taken = 0
        super()._send(peer, *tensors)
        if self.is_late:
            sent = self._sending.pop()
            late: list[Any] = [_Late(work) for work in sent.works]
            self._sending.append(sent._replace(works=late))
        self._note()


class _Nothing:
    """A stage that computes nothing and whose messages are one number."""

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(1)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(1)

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None:
        pass


def watch(rank: int, schedules: list[Schedule]) -> list[list[tuple[int, int, int]]]:
    """Return the most buffers that the rank held under every schedule, with real sends and with late ones."""
    dist.init_process_group("gloo")
    pipeline = list(range(dist.get_world_size()))
    groups = direction_groups(pipeline)
    found = []
    for schedule in schedules:
        stages = {stage: _Nothing() for stage in schedule.placement.stages_of(rank)}
        held = []
        for is_late in (False, True):
            channels = _Watched(pipeline, *groups, (1,), torch.float, torch.device("cpu"))
            channels.is_late = is_late
            execute(plan_rank(schedule, rank), Rank(stages, channels))
            held.append((channels.received, channels.sent, channels.most))
        found.append(held)
    return found


def sent_by(schedule: Schedule, rank: int) -> int:
    """Return the number of messages that leave a rank."""
    placement = schedule.placement
    messages = (outgoing_message(action, placement.stages) for action in schedule.orders[rank])
    return sum(placement.rank_of(message.receiver) != rank for message in messages if message)


@pytest.mark.parametrize("ranks", [2, 4])
def test_channels_hold_no_more_than_is_counted(ranks: int) -> None:
    """Receives agree exactly, and so do sends that are always late: all that may be unfinished are."""
    schedules = [catalog.build(name, ranks, m) for name in WATCHED for m in (1, ranks, 2 * ranks)]
    schedules.append(catalog.forward_only(v(ranks), 2 * ranks))
    held = run_ranks(watch, ranks, schedules)
    for number, schedule in enumerate(schedules):
        for rank, counted in enumerate(peak_messages(schedule)):
            may_be_unfinished = min(sent_by(schedule, rank), SENDS_AHEAD + 1)
            (received, sent, most), (_, late, most_with_late) = held[rank][number]
            assert received == counted - may_be_unfinished, schedule.name
            assert late == may_be_unfinished, schedule.name
            assert sent <= late
            assert max(most, most_with_late) <= counted


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("interval", [1, 3, 8])
def test_a_pipeline_that_never_flushes_receives_no_more_than_1f1b(ranks: int, interval: int) -> None:
    """The planner uses one of the two counts in place of the other."""
    full = ranks + SENDS_AHEAD
    counted = [most - SENDS_AHEAD - 1 for most in peak_messages(catalog.build("1f1b", ranks, full))]
    waiting = [0] * ranks
    for update in range(6):
        step = pipedream.step(Replicas.straight(ranks), interval, update, 6)
        for rank, posted in enumerate(posted_receives(Orders(step, linear(ranks)))):
            for action, arrivals in zip((*step[rank], None), posted, strict=True):
                waiting[rank] += len(arrivals)
                assert waiting[rank] <= counted[rank]
                if action is not None:
                    waiting[rank] -= rank > 0 if action.kind is Kind.F else rank + 1 < ranks
    assert waiting == [0] * ranks


def test_counted_by_hand() -> None:
    """One microbatch through two ranks: each sends one message and takes one."""
    schedule = catalog.build("1f1b", 2, 1)
    timeline = simulate(schedule, Costs((StageCosts(1, 1, 1, 10), StageCosts(1, 1, 1, 20)), message=3))
    assert timeline.peak_messages == (2, 2)
    assert timeline.peak_memory == (10 + 2 * 3, 20 + 2 * 3)
    free = simulate(schedule, replace(timeline.costs, message=0.0))
    assert free.peak_memory == free.peak_activations == (10, 20)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_more_microbatches_never_wait_less(name: str) -> None:
    """``planner.search`` tries 2p microbatches first: what does not fit then does not fit with more."""
    for ranks in (2, 3, 8):
        few = peak_messages(catalog.build(name, ranks, 2 * ranks))
        for microbatches in (2 * ranks + 1, 3 * ranks, 5 * ranks + 1):
            many = peak_messages(catalog.build(name, ranks, microbatches))
            assert all(less <= more for less, more in zip(few, many, strict=True))


CUTS = [linear(2), linear(5), v(2), v(3), loop(2, 3), loop(5, 2), wave(2, 4), wave(3, 4)]


@pytest.mark.parametrize("placement", CUTS, ids=str)
def test_one_microbatch_at_a_time_needs_the_least(placement: Placement) -> None:
    stages = tuple(StageCosts(1, 1, 1, 1 + stage % 3, 0.5) for stage in range(placement.stages))
    for microbatches, message in product((1, 2, 3, 9), (0.0, 0.125, 5.0)):
        costs = Costs(stages, message=message)
        problem = problem_of(placement, microbatches, costs, [100.0] * placement.ranks)
        timeline = simulate(problem.schedule(one_at_a_time(problem), "one"), costs)
        least = least_limits(costs, placement, microbatches)
        assert timeline.peak_memory == pytest.approx(least)
        for name, entry in catalog.ENTRIES.items():
            if entry.shape is placement.shape and placement.chunks == entry.chunks:
                other = simulate(catalog.build(name, placement.ranks, microbatches), costs).peak_memory
                assert all(peak * NOISE >= needed for peak, needed in zip(other, least, strict=True))


def test_a_search_leaves_room_for_messages() -> None:
    """Where messages make the best orders unfit, the search still finds shorter ones than the families."""
    times = {"forward": 1.0, "input_gradient": 1.1, "weight_gradient": 0.7, "hop": 0.05}
    free = Costs.uniform(v(4), **times)
    dear = replace(free, message=0.125)
    # Room for six chunks and the fewest messages, but not for as many as there are beside six chunks.
    limit = 6.8
    both, alone = (compile_schedule(4, 8, costs, limit, trials=200) for costs in (dear, free))
    assert max(simulate(alone.timeline.schedule, dear).peak_memory) > limit
    assert max(both.timeline.peak_memory) <= limit
    built = [catalog.build(name, 4, 8) for name in catalog.NAMES if catalog.entry(name).chunks <= 2]
    families = [simulate(schedule, dear.merged(schedule.placement.stages)) for schedule in built]
    fitting = [one.makespan for one in families if max(one.peak_memory) <= limit]
    assert alone.timeline.makespan <= both.timeline.makespan < min(fitting)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "v-half", "v-zb"])
def test_a_family_must_fit_with_its_own_messages(name: str) -> None:
    schedule = catalog.build(name, 4, 8)
    placement = schedule.placement
    costs = replace(Costs.unit(placement), message=0.25)
    peaks = simulate(schedule, costs).peak_memory
    for limits in (peaks, [peak - 0.1 for peak in peaks]):
        found = compile_schedule(4, 8, costs, limits, placements=[placement], trials=0).timeline
        assert all(peak <= limit for peak, limit in zip(found.peak_memory, limits, strict=True))
        if limits == peaks:
            assert found.makespan <= simulate(schedule, costs).makespan
        else:
            assert found.schedule.orders != schedule.orders


def test_a_rank_without_activations_has_nothing_to_give_up() -> None:
    """Its whole limit is for messages; where these exceed it, less room for activations would not help."""
    costs = Costs((StageCosts(1, 1, 1, 0.7), StageCosts(1, 1, 1, 0)), message=0.3)
    limits = (5.0, 6 * 0.3)
    timeline = compile_schedule(2, 8, costs, limits, trials=30).timeline
    assert all(peak <= limit * NOISE for peak, limit in zip(timeline.peak_memory, limits, strict=True))


def test_the_least_feasible_limit_is_told_truly() -> None:
    costs = replace(Costs.unit(v(3)), message=0.25)
    with pytest.raises(
        InfeasibleLimit, match=r"activations of all its stages and a few messages.* least 3\.5$"
    ):
        compile_schedule(3, 8, costs, 3.4)
    assert max(compile_schedule(3, 8, costs, 3.5, trials=0).timeline.peak_memory) == 3.5
