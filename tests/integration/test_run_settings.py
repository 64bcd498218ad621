"""What runners know of a training run beside its schedule."""

from types import SimpleNamespace

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron.requested import Pipeline, Settings
from megatron_pp_ext.megatron.start_up import settings
from megatron_pp_ext.pipedream import flush_free
from tests.support.flags import PP4, arguments

THIRD = SimpleNamespace(training_steps=2)
"""A step behind two that the runner ran itself."""


def test_what_megatron_settles_later_is_read_when_it_is_needed() -> None:
    """A run that resumes at step 40 has run it for the first time; --train-samples become steps at last."""
    args = arguments(f"{PP4} --train-iters 3")
    known = settings(args, Pipeline(named("v-half", 4, 8)))
    assert known.steps_done(0) == 0
    args.curr_iteration, args.train_iters = 42, 50
    assert known.steps_done(2) == 42
    assert flush_free.steps_to_come(known, THIRD) == 8


def test_a_loop_that_says_nothing_leaves_the_count_to_the_runner() -> None:
    assert Settings().steps_done(2) == 2
    assert flush_free.steps_to_come(Settings(train_steps=lambda: 10), THIRD) == 8
    with pytest.raises(ValueError, match=r"^train_steps is not given, but .*; give the number of steps, or "):
        flush_free.steps_to_come(Settings(), THIRD)
