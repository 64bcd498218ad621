"""The heap of the loops: actions come out by time and number, each once."""

from random import Random

import pytest

from megatron_pp_ext.compiler.search.tables import heap_of, pop, push


@pytest.mark.parametrize("seed", range(5))
def test_actions_come_out_by_time_and_then_by_number(seed):
    random, count = Random(seed), 40
    heap, waiting, inside = heap_of(count), 0, {}
    for _ in range(400):
        if inside and random.random() < 0.45:
            action = pop(heap, waiting)
            waiting -= 1
            assert action == min(inside, key=lambda one: (inside[one], one))
            del inside[action]
        else:
            action, time = random.randrange(count), random.randrange(20)
            waiting = push(heap, waiting, time, action)
            inside.setdefault(action, time)
        assert waiting == len(inside)
        assert {*heap.waits.nonzero()[0].tolist()} == {*inside}
