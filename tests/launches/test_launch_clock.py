"""The launch queues with a clock agree with times by hand and, if messages cost nothing, with simulation."""

import pytest

from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.launches.clocked import PROCESSORS, seconds
from tests.support.launches.entries import Kernel, Transfer, Wait
from tests.support.launches.grid import families
from tests.support.launches.hardware import Setting
from tests.support.launches.policies import Policy, launch

SEND, RECEIVE = Transfer("down", 1, is_send=True), Transfer("down", 0, is_send=False)


def test_a_receive_that_waits_slows_compute_down():
    """Half of the device waits for 1.1 s, in which 0.55 s of work are done; the other 0.45 s run alone."""
    sender, receiver = (Kernel("0F0"), SEND), (RECEIVE, Kernel("1W0"), Wait(0))
    assert seconds([sender, receiver], Setting(), 0.1, PROCESSORS // 2) == pytest.approx(1.55)
    assert seconds([sender, receiver], Setting(), 0.1, 0) == 1


def test_compute_waits_for_a_message_and_its_flight():
    sender, receiver = (Kernel("0F0"), SEND), (RECEIVE, Wait(0), Kernel("1F0", 2.0))
    for queues in (1, 32):
        assert seconds([sender, receiver], Setting(queues), 0.1, 4) == pytest.approx(3.1)


def test_several_messages_leave_compute_one_processor():
    sender = (Kernel("0F0"), *[Transfer(f"down {n}", 1, is_send=True) for n in range(3)])
    receiver = (
        *[Transfer(f"down {n}", 0, is_send=False) for n in range(3)],
        Kernel("1W0", 1 + 1 / PROCESSORS),
    )
    assert seconds([sender, receiver], Setting(32), 0.0, PROCESSORS // 2) == pytest.approx(2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 9)])
def test_messages_that_take_no_processors_are_those_of_the_simulator(ranks, microbatches):
    """With enough queues and every receive posted in front, only the order and the hops take time."""
    for steps in families(ranks, microbatches):
        placement = steps[0].placement
        costs = Costs.uniform(placement, forward=1, input_gradient=1, weight_gradient=1, hop=0.05)
        found = seconds(launch(steps, Policy(ahead=10**6)), Setting(32), 0.05, 0)
        assert found == pytest.approx(simulate(steps[0], costs).makespan), steps[0].name


def test_a_pipeline_that_hangs_has_no_length():
    with pytest.raises(
        RuntimeError, match=r"rank 1, launch 0: receive from 0 .* waits for what nobody launches"
    ):
        seconds([(Kernel("0F0"),), (RECEIVE, Wait(0))], Setting(), 0.1, 4)
