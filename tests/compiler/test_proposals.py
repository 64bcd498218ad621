"""What a search proposes: the shortest of its results whose messages fit, too."""

from megatron_pp_ext.compiler.bounds import Cut
from megatron_pp_ext.compiler.search import proposals
from megatron_pp_ext.compiler.search.proposals import Proposal, Proposer, one_at_a_time
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v

RANKS, MICROBATCHES, BOUND, LIMITS = 2, 4, 30, (1000.0, 1000.0)


def proposed(lengths, fitting, monkeypatch):
    """Search where the results have ``lengths``, and those at the places ``fitting`` keep the limits.

    Return the lengths of the proposals, the places that the search came to, and the lengths that were judged.
    """
    placement = v(RANKS)
    proposer = Proposer(Cut(placement, MICROBATCHES, Costs.unit(placement), LIMITS))
    proposer.bound = BOUND
    reached: list[int] = []
    judged: list[float] = []

    def search(problem, trials, floor, starts):
        for place, length in enumerate(lengths):
            reached.append(place)
            yield length * problem.scale, one_at_a_time(problem), f"result {place}"

    def keeps(one: Proposal) -> bool:
        judged.append(one.makespan)
        return int(one.origin.split()[1]) in fitting

    monkeypatch.setattr(proposals, "search", search)
    monkeypatch.setattr(Proposal, "is_kept", property(keeps))
    found = proposer.from_search(1)
    return [one.makespan for one in found], reached, judged


def test_a_search_ends_with_a_result_at_the_bound_that_fits(monkeypatch):
    assert proposed([40, 30, 30, 35], {0, 2, 3}, monkeypatch)[:2] == ([30], [0, 1, 2])


def test_a_search_goes_on_while_none_at_the_bound_fits(monkeypatch):
    found, reached, _ = proposed([30, 40, 35, 36], {1, 2, 3}, monkeypatch)
    assert found == [35]
    assert reached == [0, 1, 2, 3]


def test_results_are_judged_from_the_shortest_on(monkeypatch):
    """What is longer than one that fits is not, since counting messages takes long."""
    _, _, judged = proposed([50, 40, 35, 45], {0, 1, 3}, monkeypatch)
    assert judged == [35, 40]


def test_results_that_rounding_may_reverse_keep_their_order(monkeypatch):
    close = 35 * (1 + proposals.CLOSE / 2)
    assert proposed([close, 40, 35], {0, 1, 2}, monkeypatch)[0] == [close, 35]
