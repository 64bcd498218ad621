"""Other rules for posting receives hang in the model of launch queues, so the product plans its receives.

At first the channels posted two receives ahead of their turn.  That rule, one receive ahead, and receives
when they are needed were examined in a first model of launch queues.  Its findings are asserted here in kind,
as its evaluations and its pipelines without a flush may have differed from those of ``grid``.
"""

from itertools import product

import pytest

from tests.support.launches import synchronizations
from tests.support.launches.grid import everything
from tests.support.launches.hardware import Setting
from tests.support.launches.policies import ONE_AHEAD, TWO_AHEAD, WHEN_NEEDED, launch
from tests.support.launches.queues import circle

PIPELINES = [
    steps for ranks, factor in product((2, 4), (1, 2, 4)) for steps in everything(ranks, factor * ranks)
]


@pytest.fixture(scope="module")
def launched():
    return {
        policy: [launch(steps, policy) for steps in PIPELINES]
        for policy in (TWO_AHEAD, ONE_AHEAD, WHEN_NEEDED)
    }


def one_way(steps):
    """Whether this is an evaluation with a linear placement, in which no message ever comes back."""
    return steps[0].name == "forward-only" and steps[0].placement.shape == "linear"


def free(launches, setting, synchronized=synchronizations.never):
    """Return the pipelines that do not hang."""
    return [
        steps
        for steps, ranks in zip(PIPELINES, launches, strict=True)
        if not circle(tuple(map(synchronized, ranks)), setting)
    ]


@pytest.mark.parametrize("sends_wait", [True, False])
def test_two_posted_ahead_need_many_queues(launched, sends_wait):
    """With one or two queues all pipelines with messages both ways hang, with eight none does."""
    only_one_way = [steps for steps in PIPELINES if one_way(steps)]
    for queues in (1, 2):
        assert free(launched[TWO_AHEAD], Setting(queues, sends_wait)) == only_one_way
    for queues in (8, 32):
        assert free(launched[TWO_AHEAD], Setting(queues, sends_wait)) == PIPELINES
    shared = free(launched[TWO_AHEAD], Setting(8, sends_wait, foreign_streams=6))
    assert len(only_one_way) < len(shared) < len(PIPELINES), "foreign streams make messages share queues"


@pytest.mark.parametrize("sends_wait", [True, False])
@pytest.mark.parametrize("policy", [TWO_AHEAD, ONE_AHEAD])
def test_receives_ahead_need_a_device_that_is_never_synchronized(launched, policy, sends_wait):
    assert free(launched[policy], Setting(32, sends_wait), synchronizations.before_every_action) == [
        steps for steps in PIPELINES if one_way(steps)
    ]


@pytest.mark.parametrize("policy", [ONE_AHEAD, WHEN_NEEDED])
def test_fewer_ahead_hang_only_where_sends_wait(launched, policy):
    for queues in (1, 2):
        assert 0 < len(PIPELINES) - len(free(launched[policy], Setting(queues))) < len(PIPELINES) / 3
        assert free(launched[policy], Setting(queues, sends_wait=False)) == PIPELINES
    for queues in (8, 32):
        assert free(launched[policy], Setting(queues)) == PIPELINES


def test_receives_when_needed_and_sends_that_leave_at_once_cannot_hang(launched):
    """In that case a rank waits only for messages of actions that the schedule itself needs first."""
    strictest = synchronizations.before_every_launch
    assert free(launched[WHEN_NEEDED], Setting(1, sends_wait=False), strictest) == PIPELINES
    assert len(free(launched[WHEN_NEEDED], Setting(1), strictest)) < len(PIPELINES)


def test_one_stream_a_group_is_not_enough_for_receives_ahead(launched):
    hanging = {
        (policy, sends_wait): len(PIPELINES)
        - len(free(launched[policy], Setting(32, sends_wait, stream_a_pair=False)))
        for policy in launched
        for sends_wait in (True, False)
    }
    assert hanging[TWO_AHEAD, False] == hanging[TWO_AHEAD, True] > hanging[ONE_AHEAD, True] > 0
    assert hanging[ONE_AHEAD, False] == hanging[ONE_AHEAD, True] > hanging[WHEN_NEEDED, True] > 0
    assert hanging[WHEN_NEEDED, False] == 0
