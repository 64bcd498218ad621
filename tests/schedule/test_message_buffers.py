"""Message buffers counted by hand: receives that wait, and sends that may be unfinished."""

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.simulate import peak_messages


@pytest.mark.parametrize(
    ("name", "p", "m", "received", "sent"),
    [
        # One microbatch: every message is taken before the next one is posted.
        ("1f1b", 2, 1, (1, 1), (1, 1)),
        ("1f1b", 4, 1, (1, 1, 1, 1), (1, 2, 2, 1)),
        # A V sends over both of its legs, and nothing at its turn.
        ("v-half", 2, 1, (1, 1), (2, 2)),
        # The first rank is done with its second forward before the last rank is with its first.
        ("1f1b", 2, 2, (1, 2), (2, 2)),
        ("1f1b", 2, 8, (1, 2), (8, 8)),
    ],
)
def test_by_hand(name, p, m, received, sent):
    """``SENDS_AHEAD`` of the sent messages may be unfinished, and the one that was just sent."""
    both = tuple(take + min(give, SENDS_AHEAD + 1) for take, give in zip(received, sent, strict=True))
    assert peak_messages(catalog.build(name, p, m)) == both


def test_gpipe_s_forwards_wait_for_nobody():
    """All ranks run forwards at one pace, so two activations wait at most however many microbatches come."""
    few, many = (peak_messages(catalog.build("gpipe", 4, m)) for m in (8, 64))
    assert few == many == (2 + SENDS_AHEAD + 1,) * 4
