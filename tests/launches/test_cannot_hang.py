"""No pipeline of the product hangs, whatever queues, buffers, streams and synchronizations a GPU has.

The launches of its own executor, channels and plans are recorded for every rank, and the model of launch
queues looks for circles.  Most pipelines are run in the strictest setting alone, which stands for all others
(``test_launch_queues.test_the_strictest_setting_stands_for_all`` has the argument).
"""

from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Action, Announced, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.placement import linear, v, wave
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import slow
from tests.support.launches import synchronizations
from tests.support.launches.entries import Collective, Copy, HostWait, Kernel, Transfer, Wait
from tests.support.launches.grid import copies, everything, shared_vocabularies, without_flush
from tests.support.launches.hardware import Setting
from tests.support.launches.queues import circle
from tests.support.launches.recording import plans, record, record_plans
from tests.support.offloaded import with_offloaded
from tests.support.tiers import first

SETTINGS = [
    *(Setting(*choice) for choice in product((1, 2, 8, 32), (True, False), (True, False))),
    *(Setting(8, *choice, foreign_streams=6) for choice in product((True, False), (True, False))),
]
SOMETIMES = (
    synchronizations.never,
    synchronizations.before_every_action,
    synchronizations.before_the_first_of_each_kind,
)


ANNOUNCED = Announced.FIRST, Announced.EVERY


def strictest(launches):
    """Return the circle, if any, with a synchronization before every launch and sends that wait."""
    return circle(tuple(map(synchronizations.before_every_launch, launches)), Setting(1))


def assert_finishes_strictly(plans_of_ranks, what):
    for sends_shapes in (False, True):
        assert strictest(record_plans(plans_of_ranks, sends_shapes=sends_shapes)) == "", (what, sends_shapes)


def record_announced(plans_of_ranks, announced):
    return record_plans(plans_of_ranks, sends_shapes=True, has_one_shape=announced is Announced.FIRST)


def assert_finishes_announced(plans_of_ranks, announced, what):
    assert strictest(record_announced(plans_of_ranks, announced)) == "", what
    # What is planned for shapes that are announced runs with known ones too.
    assert strictest(record_plans(plans_of_ranks)) == "", what


def assert_finishes_everywhere(launches, what):
    for setting in SETTINGS:
        assert circle(launches, setting) == "", (what, setting)


@pytest.mark.parametrize("ranks", first(2, [2, 3, 4, 8]))
def test_everything(ranks):
    for microbatches in sorted({1, ranks, 2 * ranks, 4 * ranks}):
        for steps in everything(ranks, microbatches):
            assert_finishes_strictly(plans(steps), (steps[0].name, steps[0].placement, microbatches))


@pytest.mark.parametrize("ranks", first(2, [2, 3, 4, 5, 6, 7, 8]))
def test_announced_shapes(ranks):
    """Hosts stop in receives, which are posted late."""
    for microbatches in sorted({1, ranks, 2 * ranks + 1, 4 * ranks}):
        for steps in everything(ranks, microbatches):
            what = steps[0].name, steps[0].placement, microbatches
            for announced in ANNOUNCED:
                plans_of_ranks = plans(steps, announced)
                assert_finishes_announced(plans_of_ranks, announced, (*what, announced))


@pytest.mark.parametrize(("ranks", "microbatches"), first(1, [(3, 3), (2, 1), (4, 4)]))
def test_announced_shapes_in_every_setting(ranks, microbatches):
    for steps in everything(ranks, microbatches):
        for announced, synchronized in product(ANNOUNCED, SOMETIMES):
            launches = record_announced(plans(steps, announced), announced)
            what = steps[0].name, steps[0].placement, announced, synchronized.__name__
            assert_finishes_everywhere(tuple(map(synchronized, launches)), what)


@pytest.mark.parametrize("ranks", first(1, [2, 3, 4]))
def test_vocabularies_that_all_ranks_share(ranks):
    for microbatches in sorted({1, ranks, 2 * ranks + 1}):
        for steps in shared_vocabularies(ranks, microbatches):
            plans_of_ranks = plans(steps)
            assert_finishes_strictly(plans_of_ranks, (steps[0].name, steps[0].placement, microbatches))
            launches = record_plans(plans_of_ranks)
            exchanges = [sum(isinstance(entry, Collective) for entry in of_rank) for of_rank in launches]
            # Tokens, their embedding, the hidden state, labels, and statistics; in training the gradient of
            # the hidden state, of the loss and of the embedding.
            trains = any(action.kind is Kind.T for action in steps[0])
            assert set(exchanges) == {(8 if trains else 5) * microbatches}
            assert_finishes_everywhere(launches, (steps[0].name, microbatches))


@pytest.mark.parametrize("ranks", first(1, [2, 3, 4, 8]))
def test_activations_that_wait_on_the_host(ranks):
    """A copy is a launch that only its own rank waits for, behind what the rank has launched by then."""
    for microbatches in sorted({1, ranks, 2 * ranks + 1}):
        for steps in copies(ranks, microbatches):
            plans_of_ranks, what = plans(steps), (steps[0].name, steps[0].placement, microbatches)
            assert_finishes_strictly(plans_of_ranks, what)
            launches = record_plans(plans_of_ranks)
            ways = Counter(entry.way for rank in launches for entry in rank if isinstance(entry, Copy))
            assert ways == {"out": len(steps[0].copies.reloads), "back": len(steps[0].copies.reloads)}
            assert not any(isinstance(entry, HostWait) for rank in launches for entry in rank)
            if microbatches == ranks:
                assert_finishes_everywhere(launches, what)


def test_a_backward_waits_for_its_copy_back_and_a_forward_for_memory():
    launches, _ = record([with_offloaded(catalog.build("gpipe", 2, 3))])
    waits = {}
    for at, entry in enumerate(launches):
        if isinstance(entry, Wait) and isinstance(launches[entry.on], Copy):
            kernel = next(later for later in launches[at:] if isinstance(later, Kernel))
            waits.setdefault(kernel.name, []).append(launches[entry.on].way)
    assert waits == {"0F2": ["out"], "0B0": ["out", "back"], "0B1": ["out", "back"], "0B2": ["back"]}


@pytest.mark.parametrize("name", first(0, ["v-min", "v-half", "v-zb"]))
def test_the_v_family_on_sixteen_ranks(name):
    for microbatches in (1, 16):
        assert_finishes_strictly(plans([catalog.build(name, 16, microbatches)]), microbatches)


@pytest.mark.parametrize("options", [{}, {"sends_look_done": True}, {"sends_shapes": True}], ids=str)
@pytest.mark.parametrize(("ranks", "microbatches"), first(1, [(3, 3), (2, 1), (4, 4)]))
def test_every_setting(ranks, microbatches, options):
    for steps in everything(ranks, microbatches):
        launches = record(steps, **options)
        for synchronized in SOMETIMES:
            what = steps[0].name, steps[0].placement, synchronized.__name__
            assert_finishes_everywhere(tuple(map(synchronized, launches)), what)


@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronized_between_the_updates_of_a_pipeline_without_a_flush(ranks):
    for interval in (1, 2, ranks, 2 * ranks + 1):
        launches = record(without_flush(ranks, interval), synchronized_between=True)
        assert all(rank.count(HostWait()) == 2 for rank in launches)
        assert_finishes_everywhere(launches, interval)
        assert strictest(launches) == "", interval


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 2, 1), (2, 2), (3, 2, 1)])
def test_replicated_stages(counts):
    replicas = Replicas(counts)
    for microbatches in (1, replicas.ranks, 12):
        orders = pipedream.orders(replicas, microbatches)
        plans_of_ranks = [[plan_orders(replicas.placed(orders), rank)] for rank in range(replicas.ranks)]
        assert_finishes_strictly(plans_of_ranks, microbatches)
        launches = record_plans(plans_of_ranks)
        assert_finishes_everywhere(launches, microbatches)


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2), (1, 2, 1), (3, 2), (2, 1, 3)])
def test_replicas_that_reduce_gradients_at_every_update(counts):
    """Behind the last action of an update, and before the first of the next, with messages in flight."""
    replicas, updates = Replicas(counts), 4
    stages = [tuple(replicas.ranks_of(stage)) for stage in range(replicas.stages)]
    for interval in (replicas.full_round, 2 * replicas.full_round):
        steps = [pipedream.step(replicas, interval, update, updates) for update in range(updates)]
        plans_of_ranks = [
            [plan_orders(replicas.placed(step), rank, flushes=step is steps[-1]) for step in steps]
            for rank in range(replicas.ranks)
        ]
        launches = record_plans(plans_of_ranks, reduced_between=stages)
        assert all(sum(isinstance(e, Collective) for e in rank) == updates for rank in launches)
        assert strictest(launches) == "", interval
        assert_finishes_everywhere(launches, interval)


@pytest.mark.parametrize("seed", first(2, range(8)))
def test_compiled_schedules(seed, monkeypatch, tmp_path):
    """Costs and limits are random; placements are Vs and waves of four chunks."""
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    random = Random(seed)
    ranks, microbatches = random.randint(2, 5), random.randint(1, 9)
    placement = wave(ranks, 4) if seed % 2 else v(ranks)
    stages = tuple(StageCosts(*(random.uniform(0.5, 2) for _ in range(3))) for _ in range(placement.stages))
    costs = Costs(stages, random.choice([0.0, 0.2]))
    limit = placement.chunks * ranks * random.uniform(1, 2)
    found = compile_schedule(ranks, microbatches, costs, limit, placements=[placement], trials=50)
    schedule = found.timeline.schedule
    assert_finishes_strictly(plans([schedule]), seed)
    assert_finishes_everywhere(record([schedule]), seed)
    for announced in ANNOUNCED:
        assert_finishes_announced(plans([schedule], announced), announced, (seed, announced))


@settings(max_examples=100, deadline=None)
@given(slow.schedules(), st.sampled_from(SETTINGS), st.sampled_from(SOMETIMES))
def test_any_valid_order(schedule, setting, synchronized):
    assert_finishes_strictly(plans([schedule]), schedule.orders)
    assert circle(tuple(map(synchronized, record([schedule]))), setting) == ""
    for announced in ANNOUNCED:
        assert_finishes_announced(plans([schedule], announced), announced, (schedule.orders, announced))


def test_neighbours_that_exchange_messages_at_the_same_instant():
    """One of the two must receive before it sends, so that a synchronization in between does no harm.

    Rank 0 ends its third forward when rank 1 ends its first backward.
    """
    orders = (
        [*(Action(0, Kind.F, m) for m in range(3)), *(Action(0, Kind.B, m) for m in range(3))],
        [Action(1, kind, m) for m in range(3) for kind in (Kind.F, Kind.I, Kind.W)],
    )
    schedule = Schedule("exchange", linear(2), 3, tuple(map(tuple, orders)))
    ends = {
        event.action: event.end for row in simulate(schedule, Costs.unit(linear(2))).events for event in row
    }
    assert ends[Action(0, Kind.F, 2)] == ends[Action(1, Kind.I, 0)]

    launches = record([schedule])
    behind_sends = tuple(tuple(_synchronized_behind_sends(rank)) for rank in launches)
    assert_finishes_everywhere(behind_sends, "behind sends")
    # The third message down and the first one up.
    receives_first = [
        _messages(launches[0], is_send=False)[0] < _messages(launches[0], is_send=True)[2],
        _messages(launches[1], is_send=False)[2] < _messages(launches[1], is_send=True)[0],
    ]
    assert sorted(receives_first) == [False, True], "if both sent first, both would wait there"


def _messages(launches, is_send):
    """Return the places of this rank's sends, or receives."""
    return [at for at, e in enumerate(launches) if isinstance(e, Transfer) and e.is_send == is_send]


def _synchronized_behind_sends(launches):
    found, moved_to = [], []
    for entry in launches:
        moved_to.append(len(found))
        found.append(type(entry)(moved_to[entry.on]) if hasattr(entry, "on") else entry)
        if isinstance(entry, Transfer) and entry.is_send:
            found.append(HostWait())
    return found


def test_the_recording_is_of_the_whole_schedule():
    """It has every action once, in order, and a send and a receive for each message between two ranks."""
    for steps in everything(3, 4):
        for sends_shapes in (False, True):
            launches = record(steps, sends_shapes=sends_shapes)
            ends = Counter()
            for rank, entries in enumerate(launches):
                computed = [entry.name for entry in entries if isinstance(entry, Kernel)]
                assert computed == [str(action) for schedule in steps for action in schedule.orders[rank]]
                for entry in entries:
                    if isinstance(entry, Transfer):
                        pair = (rank, entry.peer) if entry.is_send else (entry.peer, rank)
                        ends[entry.group, pair, entry.is_send] += 1
            assert ends
            for (group, pair, is_send), count in ends.items():
                assert ends[group, pair, not is_send] == count
                assert (group == "down") == (pair[0] < pair[1])
