"""Megatron's own schedules finish in the model of launch queues."""

from itertools import product

import pytest

from megatron_pp_ext.schedule import catalog
from tests.support.launches import stock
from tests.support.launches.entries import Kernel
from tests.support.launches.hardware import Setting
from tests.support.launches.queues import circle

SETTINGS = [Setting(*choice) for choice in product((1, 2, 8, 32), (True, False), (True, False))]
SIZES = [(ranks, factor * ranks) for ranks in (2, 3, 4, 8) for factor in (1, 2)]


def computed(launches):
    return tuple(tuple(entry.name for entry in rank if isinstance(entry, Kernel)) for rank in launches)


def orders(schedule):
    return tuple(tuple(map(str, order)) for order in schedule.orders)


@pytest.mark.parametrize("synchronized", [False, True])
def test_1f1b_finishes(synchronized):
    for ranks, microbatches in [*SIZES, (4, 1), (4, 3)]:
        launches = stock.one_f_one_b(ranks, microbatches, synchronized)
        assert computed(launches) == orders(catalog.build("1f1b", ranks, microbatches))
        for setting in SETTINGS:
            assert circle(launches, setting) == "", (ranks, microbatches, setting)


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_finishes(chunks):
    for ranks, microbatches in SIZES:
        launches = stock.interleaved(ranks, microbatches, chunks)
        assert computed(launches) == orders(catalog.build("interleaved", ranks, microbatches, chunks))
        for setting in SETTINGS:
            assert circle(launches, setting) == "", (ranks, microbatches, setting)
