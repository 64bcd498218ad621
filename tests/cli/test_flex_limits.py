"""What ``mpp compare`` compiles for several memory limits."""

from megatron_pp_ext.cli import flex
from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.compiler.make import Made
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs


def test_a_longer_schedule_is_not_used_for_more_memory(monkeypatch):
    """The compiler may find a longer one for more memory, and none for the least."""

    def make(request, costs):
        if request.limit < 0.4:
            raise InfeasibleLimit
        return Made(catalog.build("v-zb" if request.limit < 0.45 else "v-min", 4, 8))

    monkeypatch.setattr(flex, "make", make)
    found = flex.some_limits(4, 8, Costs.per_rank(4, 2))
    assert list(found) == [5 / 12, 1 / 2, 7 / 12, 2 / 3, 5 / 6, 1]
    assert {timeline.schedule.name for timeline in found.values()} == {"v-zb"}


def test_what_is_compiled_keeps_the_limit():
    found = flex.some_limits(2, 4, Costs.per_rank(2, 2))
    assert 1 in found and 1 / 3 not in found
    assert all(max(line.peak_activations) <= fraction * 2 for fraction, line in found.items())
    lengths = [line.makespan for line in found.values()]
    assert lengths == sorted(lengths, reverse=True)
