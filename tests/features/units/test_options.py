"""What requests for slices may say."""

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.options import Ordering, Slices, are_by_length, slices, with_order
from megatron_pp_ext.job import call, pipeline
from megatron_pp_ext.job.model_config import in_words_of_call
from tests.features.units.test_estimates import asked


def test_slices_keep_the_limit_of_a_compiled_order() -> None:
    sliced = named("flex", 2, 4, limit=0.5).with_option(Slices(4096))
    assert not are_by_length(sliced)
    ordered = with_order(sliced, "search")
    assert ordered.option(Ordering) == Ordering("search")
    assert are_by_length(ordered)
    assert not are_by_length(with_order(sliced, "given"))


def test_a_length_that_cannot_be() -> None:
    for given in (0, -1, True, 2.5, "some"):
        with pytest.raises(ValueError, match="must be a whole number from 1 on, or auto"):
            slices(given, 8)
    with pytest.raises(ValueError, match="does not divide the 8 tokens"):
        slices(3, 8)
    assert slices("auto", 8) == Slices(None)


def test_a_flag_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="must be a whole number or auto"):
        asked("--pipeline-schedule v-half --pipeline-slice-tokens many")


def test_a_step_that_is_planned_needs_no_divisor() -> None:
    given = asked("--pipeline-schedule flex --pipeline-memory-limit 0.5 --pipeline-slice-tokens 5000")
    with pytest.raises(ValueError, match="does not divide"):
        pipeline.read(given, 1)
    planned = pipeline.read(given.with_arguments(pipeline_order="search"), 1)
    assert are_by_length(planned)
    assert planned.option(Slices) == Slices(5000)


@pytest.mark.parametrize("more", [{"offload": 0.5}, {"offload": "auto"}, {"vocabulary": "shared"}])
@pytest.mark.parametrize("order", [None, "rule"])
def test_a_call_that_cannot_be_is_refused_before_there_is_a_model(more: dict, order: str | None) -> None:
    """In whatever order the arguments are given."""
    (name,) = more
    for arguments in ({"slice_tokens": 4, **more}, {**more, "slice_tokens": 4}):
        line = f"^slice_tokens 4 does not support {name}: .*; leave one of"
        with pytest.raises(ValueError, match=line), in_words_of_call():
            call.request_of_call("v-half", 2, 4, **arguments, order=order)
    call.request_of_call("v-half", 2, 4, **more, order=order)
