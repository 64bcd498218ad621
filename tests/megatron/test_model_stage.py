"""A stage made of a model chunk: what it tells Megatron's own forward_step, and what it keeps."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.features.pairs.megatron import run_pair
from megatron_pp_ext.megatron.runners import model_stage
from megatron_pp_ext.megatron.runners.model_stage import ModelStage, StepInputs, step_of_one_call
from megatron_pp_ext.schedule.actions import Action, Kind

TOKENS = (3, 5, 4)


class Forwards:
    """Stands in for Megatron's forward_step; the numbers of tokens differ between microbatches."""

    def __init__(self) -> None:
        self.first: list[bool] = []
        self.gathered: list[int] = []

    def __call__(self, function, iterator, chunk, microbatches, activation, losses, config, **about):
        self.first.append(about["is_first_microbatch"])
        return activation * 2, torch.tensor(TOKENS[about["current_microbatch"]])

    def first_forward(self, chunk: int) -> None:
        self.gathered.append(chunk)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    stand_in = Forwards()
    monkeypatch.setattr(model_stage.stock_schedules, "forward_step", stand_in)
    monkeypatch.setattr(model_stage, "as_chunk", lambda vp_stage: nullcontext())
    return stand_in


def stage(forwards: Forwards, forward_only: bool = False) -> ModelStage:
    inputs = StepInputs(
        forward_step_func=None,
        group=None,
        groups=None,
        shape=(),
        model=[None, None],
        iterators=[None, None],
        microbatches=len(TOKENS),
        config=SimpleNamespace(
            deallocate_pipeline_outputs=True, timers=None, distribute_saved_activations=False
        ),
        cp_size=1,
        data_parallel=forwards,
        forward_only=forward_only,
        collect_non_loss_data=False,
        first_val_step=True if forward_only else None,
    )
    return ModelStage(inputs, stage=2, chunk=1, vp_stage=1, is_last=False, last=None)


def run(one: ModelStage) -> list[torch.Tensor]:
    return [one.forward(number, torch.ones(4)) for number in range(len(TOKENS))]


def test_tokens_and_outputs_of_a_step(forwards: Forwards) -> None:
    """Tokens are those of all microbatches; an output in flight keeps its graph and not its numbers."""
    one = stage(forwards)
    handed_on = run(one)
    assert one.inputs.tokens.item() == sum(TOKENS)
    assert [output.tolist() for output in handed_on] == [[2.0] * 4] * 3
    assert not any(output.requires_grad for output in handed_on)
    kept = [output for _, output in one.in_flight.values()]
    assert [output.numel() for output in kept] == [1] * 3
    assert all(output.requires_grad for output in kept)


def test_the_first_microbatch_is_announced(forwards: Forwards) -> None:
    """To layers that cast their weights then, and to what gathers the next chunk's weights."""
    run(stage(forwards))
    assert forwards.first == [True, False, False]
    assert forwards.gathered == [1]


def test_an_evaluation_keeps_nothing(forwards: Forwards) -> None:
    one = stage(forwards, forward_only=True)
    handed_on = run(one)
    assert not one.in_flight
    assert not any(output.requires_grad for output in handed_on)


class Half:
    """Stands in for a planned stage, and notes for which chunk Megatron answers while a pair runs."""

    answers: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.before_forward = self.forward_half = self.backward_half = lambda *about: {}
        self.during_backward = lambda *about, in_parts: nullcontext()
        self.after_forward = lambda microbatch, activation, output, tokens: output

    @contextmanager
    def at_work(self):
        Half.answers = self.name
        yield
        Half.answers = None

    def combined(self, **halves: object) -> tuple[str | None, int, None]:
        return Half.answers, 0, None


def test_megatron_answers_for_the_chunk_of_the_forward_while_a_pair_runs() -> None:
    """A loss is that of the forward, whose chunk may be another one than the backward's."""
    stages = {0: Half("first"), 3: Half("last")}
    output, _ = run_pair(stages, Action(3, Kind.F, 1), None, Action(0, Kind.B, 0), None)
    assert output == "last" and Half.answers is None


class Doubling(torch.nn.Module):
    """Stands in for a model, which doubles what it gets."""

    def forward(self, given):
        return given * 2


STEPS = {
    "what the model returns": lambda model, given: model(given),
    "another tensor": lambda model, given: model(given) / 2,
    "the same tensor, written to": lambda model, given: model(given).div_(2),
    "the same tensor with other numbers": lambda model, given: _with_data(model(given)),
    "a second call": lambda model, given: model(model(given)),
    "no call": lambda model, given: given * 2,
}


def _with_data(output):
    output.data = output.data / 2
    return output


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_of_one_call_leaves_the_output_as_it_is(kind, mode):
    """Also where torch counts no writes, and where a number is none."""
    loss, given = object(), torch.tensor([1.0, torch.nan])
    with mode():

        def run():
            return step_of_one_call(lambda data, model: (STEPS[kind](model, given), loss), None, model, "--x")

        model = Doubling()
        if kind == "what the model returns":
            output, function = run()
            assert output[0] == 2 and function is loss
        else:
            times = {"a second call": "called it 2 times", "no call": "called it 0 times"}
            with pytest.raises(ValueError, match=times.get(kind, "^--x needs a forward step which returns")):
                run()
        assert not model._forward_hooks
