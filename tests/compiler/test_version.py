"""What the compiler finds for a few inputs, by its version: a change of the search has to raise the version.

Schedules are kept on disk under the version, and every rank of a job compiles by itself: an old schedule that
is used under a new search, or two machines that find two, would be seen here.  The search counts in whole
numbers, so the digests are those of every machine.
"""

import pytest

from megatron_pp_ext.compiler import compile as compiler
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import Placement, v, wave

DIGESTS = {
    "between families": "9c93957faafa14ba",
    "near V-Min's memory": "4921c0b1889eb4f8",
    "near V-Half's memory": "eb7513b6ec7f4443",
    "four chunks": "634c8f131d5c67e4",
    "four chunks, costly messages": "e06783262ca26b17",
    "unequal stages": "9825ed6578c64af2",
    "few microbatches": "71b3c6654a14ee03",
}
"""By what is asked for: the first digits of the schedule's digest.  They are those of ``VERSION``."""

VERSION = 12


def times(placement: Placement, f: float, i: float, w: float, hop: float) -> Costs:
    return Costs.uniform(placement, forward=f, input_gradient=i, weight_gradient=w, hop=hop)


UNEQUAL = Costs(tuple(StageCosts(1 + s / 4, 1.5, 1 - s / 8, 1, 0.25) for s in range(6)), 0.125)
INPUTS = {
    "between families": (4, 8, times(v(4), 10, 11, 7, 1), 5.0),
    "near V-Min's memory": (3, 7, times(v(3), 1, 1.1, 0.7, 0.05), 4.0),
    "near V-Half's memory": (4, 9, times(v(4), 1, 1.1, 0.7, 0.05), 6.0),
    "four chunks": (2, 5, times(wave(2, 4), 1, 1, 1, 0), 6.0),
    "four chunks, costly messages": (3, 6, times(wave(3, 4), 2, 2, 1, 0.5), 9.0),
    "unequal stages": (3, 6, UNEQUAL, 5.0),
    "few microbatches": (5, 3, times(v(5), 3, 4, 2, 1), 5.0),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_search_with_another_result_has_another_version(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    ranks, microbatches, costs, limit = INPUTS[name]
    found = compile_schedule(ranks, microbatches, costs, limit, trials=100).timeline.schedule.digest[:16]
    assert (compiler.VERSION, found) == (VERSION, DIGESTS[name]), "raise VERSION, and renew these digests"
