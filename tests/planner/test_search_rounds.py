"""A search looks at what `auto` leaves to it after all else: ending early, it has what it has without."""

import pytest

from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.result import Compiles
from tests.planner.test_configuration_search import A100, space

LIMIT, SIZES = 25e9, {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1}
AUTO = [
    {"pipeline_vocabulary": "auto"},
    {"pipeline_offload": "auto"},
    {"pipeline_slice_tokens": "auto"},
    {"pipeline_vocabulary": "auto", "pipeline_offload": "auto"},
]


def search(compiles=Compiles.NEVER, **choices) -> Search:
    return Search(space(batch=16, fixed=tuple(SIZES), **SIZES, **choices), A100, LIMIT, 0.05, 8, compiles)


def steps(result) -> list[float]:
    return [one.estimate.step_seconds for one in result.best]


def interrupted_in_round(which: int, phase: str = "bounding"):
    """A progress that interrupts round ``which``, from 1 on, as it begins with a ``phase``."""
    begun = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal begun
        begun += (what, done) == (phase, 0)
        if begun == which:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("choices", AUTO, ids=lambda one: "+".join(one))
@pytest.mark.parametrize("compiles", [Compiles.NEVER, Compiles.TOO])
def test_the_first_round_is_the_search_without_choices(choices, compiles):
    alone = search(compiles).run()
    found = search(compiles, **choices).run(interrupted_in_round(2))
    assert steps(found) == steps(alone)
    assert [one.candidate.name for one in found.best] == [one.candidate.name for one in alone.best]
    assert (found.legal, found.unfit, found.replayed) == (alone.legal, alone.unfit, alone.replayed)
    assert found.stopped.untried == tuple(choices)
    assert str(found.stopped) == "interrupted; " + "; ".join(
        f"--{name.replace('_', '-')} was not tried" for name in choices
    )


@pytest.mark.parametrize("choices", AUTO, ids=lambda one: "+".join(one))
def test_a_search_with_choices_that_ends_by_itself_is_no_worse(choices):
    alone, found = search().run(), search(**choices).run()
    assert found.stopped is None
    assert all(
        with_choices <= without for with_choices, without in zip(steps(found), steps(alone), strict=False)
    )
    assert len(found.best) >= len(alone.best)


def test_what_a_later_round_has_not_looked_at_is_counted():
    found = search(pipeline_vocabulary="auto").run(interrupted_in_round(2, "replaying"))
    assert found.stopped.remaining and not found.stopped.untried
    unseen = search(pipeline_vocabulary="auto").run()
    shared = [one for one in unseen.best if one.candidate.splits_head]
    assert min(map(lambda one: one.estimate.step_seconds, shared)) >= found.stopped.least_seconds


def test_an_interrupt_before_anything_is_found_is_one_in_each_round():
    with pytest.raises(KeyboardInterrupt):
        Search(space(batch=16, fixed=tuple(SIZES), **SIZES, pipeline_offload="auto"), A100, 1e9).run(
            interrupted_in_round(2)
        )
