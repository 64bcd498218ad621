"""--pipeline-vocabulary: what is refused in one line, what auto chooses, and what the run says."""

from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.features.vocabulary import order
from megatron_pp_ext.features.vocabulary.megatron.model_vocabulary import Head, ModelVocabulary
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron import start_up
from megatron_pp_ext.megatron.start_up import costs_of
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.flags import PP4, arguments, assert_refused, read, requested_by
from tests.support.tiers import first
from tests.support.training import train

SHARED = "--pipeline-vocabulary shared"
PP2 = "--pipeline-model-parallel-size 2"
LARGE = "--padded-vocab-size 65536"


def test_a_limit_without_room_for_the_parts_is_refused(monkeypatch):
    flags = f"{PP4} {SHARED} --pipeline-schedule flex --pipeline-memory-limit 100000"
    message = (
        r"limit of [\d.e+]+ on rank \d has no room for the parts of a shared vocabulary, .* keeps [\d.e+]+ "
        "there; raise --pipeline-memory-limit"
    )
    assert_refused(monkeypatch, flags, message)


def test_autocast_in_the_model_s_config_is_refused():
    """The forward step, which it surrounds, has no logits."""
    config = SimpleNamespace(enable_autocast=True)
    inputs = SimpleNamespace(collect_non_loss_data=False, config=config, shape=(1, 1, 1))
    with pytest.raises(ValueError, match=r"config has enable_autocast, .* leave one of the two out"):
        ModelVocabulary(inputs, None, None, None)


@pytest.mark.parametrize("schedule", first(1, ["v-zb", "flex --pipeline-memory-limit 2"]))
def test_auto_shares_where_steps_are_shorter(schedule, monkeypatch):
    """A vocabulary of many layers is shared, one of few rows is not; the line has the simulated gain."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{PP4} --pipeline-schedule {schedule}"
    for size, shares in ((LARGE, True), ("--padded-vocab-size 4", False)):
        args = arguments(f"{flags} --pipeline-vocabulary auto {size}")
        pipeline = requested_by(args)
        assert pipeline.placement.splits_head is shares
        lengths = []
        for value in ("", SHARED):
            other = arguments(f"{flags} {value} {size}")
            found = requested_by(other)
            model = costs_of(RequestedJob.of_args(other)).merged_from(found.request.finest)
            stages = model.of(found.placement)
            lengths.append(simulate(found.source.schedule(8), stages).makespan)
        gain = 1 - lengths[1] / lengths[0]
        said = "vocabulary shared: steps are" if shares else "vocabulary not shared: that would change"
        line = start_up.summary(pipeline, costs_of(RequestedJob.of_args(args)))
        assert said in line and f"{abs(gain):.1%}" in line


def test_auto_trains_without_sharing_where_the_parts_have_no_room(monkeypatch):
    def none_fits(*args):
        raise InfeasibleLimit("no room")

    monkeypatch.setattr(order, "_shared", none_fits)
    flags = f"{PP4} --pipeline-schedule flex --pipeline-memory-limit 0.5 --pipeline-vocabulary auto"
    pipeline = read(monkeypatch, flags)
    assert pipeline is not None and pipeline.source is not None
    assert not pipeline.placement.splits_head
    assert pipeline.source.note == "vocabulary not shared: the memory limit has no room for its parts"


def test_the_line_says_that_the_vocabulary_is_shared(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} --pipeline-schedule v-half {SHARED}")
    line = start_up.summary(requested_by(args), costs_of(RequestedJob.of_args(args)))
    assert line.endswith("; vocabulary shared by all ranks")


def test_auto_trains_within_free_memory():
    flags = f"{PP2} --pipeline-schedule auto {SHARED} --padded-vocab-size 64"
    assert max(len(rank.losses) for rank in train(2, flags.split())) == 3


@pytest.mark.parametrize("change", [lambda hidden: hidden * 2, lambda hidden: hidden.mul_(2)])
def test_a_forward_step_may_not_change_hidden_states(change):
    """The last stage returns them where the script expects losses."""
    model, hidden = torch.nn.Identity(), torch.ones(2)
    for changes in (lambda output: output, change):

        def step(iterator, model, changes=changes):
            return changes(model(hidden)), None

        forward = Head(SimpleNamespace(forward_step_func=step), None).forward(0)
        if changes is change:
            with pytest.raises(ValueError, match="--pipeline-vocabulary shared needs a forward step which"):
                forward(None, model)
        else:
            assert forward(None, model)[0] is hidden
