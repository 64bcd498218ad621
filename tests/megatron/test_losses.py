"""Under a V the losses of a step go to the last rank behind the gradients, in messages of tensors."""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training as megatron_training

from megatron_pp_ext import pretrain_gpt
from tests.support import training
from tests.support.comparison import stock
from tests.support.ranks import RankError

V_HALF = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half")

_events: list[str] = []


def listen(chunks: list[torch.nn.Module]) -> None:
    """Note when this rank's gradients are finalized and what it sends with torch's own functions."""
    training.initialize_by_layer(chunks)

    def noted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def note_and_call(*args: Any, **kwargs: Any) -> Any:
            _events.append(name)
            return call(*args, **kwargs)

        setattr(module, name, note_and_call)

    noted(megatron_training, "finalize_model_grads")
    for name in ("send", "send_object_list"):
        noted(dist, name)


def noted_events(chunks: list[torch.nn.Module]) -> list[str]:
    return _events


def test_losses_follow_the_gradients() -> None:
    """Only a count of tokens, by which gradients are divided, has to come before them."""
    per_token = "--calculate-per-token-loss"
    sender, last = training.train(2, [*V_HALF, per_token], initialize=listen, grab=noted_events)
    step = ["send", "finalize_model_grads", "send"]
    # In the first step the form of the losses comes with them.  Neighbours have met before all that.
    expected = [*step, "send", *step, *step]
    assert sender.grabbed[-len(expected) :] == expected
    assert set(sender.grabbed[: -len(expected)]) <= {"send"}
    assert last.losses == stock(2, *V_HALF[:2], per_token, "--train-iters", "3").losses


def with_loss_function(change: Callable[[dict[str, Any], int], Any]) -> Callable[..., None]:
    """An ``initialize`` that lets ``change`` make the report of each microbatch, which gets a number."""

    def initialize(chunks: list[torch.nn.Module]) -> None:
        training.initialize_by_layer(chunks)
        loss_func, numbers = pretrain_gpt.loss_func, count()

        def changed_loss_func(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            *values, report = loss_func(*args, **kwargs)
            return *values, change(report, next(numbers))

        pretrain_gpt.loss_func = changed_loss_func
        get_function = megatron_training.get_forward_backward_func

        def get_noting_function(*args: Any, **kwargs: Any) -> Callable[..., list[Any]]:
            run = get_function(*args, **kwargs)

            def run_and_note(**contract: Any) -> list[Any]:
                losses = run(**contract)
                _events.append([{type(entry).__name__: None, **entry} for entry in losses])
                return losses

            return run_and_note

        megatron_training.get_forward_backward_func = get_noting_function

    return initialize


def odd_store(report: dict[str, Any], number: int) -> defaultdict[str, Any]:
    """Add what Megatron leaves alone: it logs what the first of a step's eight microbatches has."""
    odd = defaultdict(lambda: None, report)
    if number % 8:
        loss = report["lm loss"]
        odd["rewards"] = torch.nested.nested_tensor([loss, loss.repeat(number % 3)], layout=torch.jagged)
        odd["rest"] = [loss.double().reshape(1, 2).t(), loss.to_sparse(), {"number": number}, None]
    return odd


def test_whatever_the_loss_function_returns_arrives() -> None:
    """As under stock, in training and in the evaluations between, whose microbatches are others."""
    flags = ("--eval-interval", "1", "--eval-iters", "1", "--train-iters", "2")
    ours, theirs = (
        training.train(2, [*schedule, *flags], initialize=with_loss_function(odd_store), grab=noted_events)
        for schedule in (V_HALF, V_HALF[:2])
    )
    assert len(theirs[1].grabbed) == 6  # two at the end
    assert ours[0].grabbed == theirs[0].grabbed == [[]] * 6
    torch.testing.assert_close(comparable(ours[1].grabbed), comparable(theirs[1].grabbed), rtol=0, atol=0)


def comparable(value: Any) -> Any:
    """``value`` with jagged tensors as lists."""
    if isinstance(value, dict):
        return {key: comparable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(one) for one in value]
    return list(value.unbind()) if isinstance(value, torch.Tensor) and value.is_nested else value


def test_what_cannot_travel_ends_the_job_in_one_line() -> None:
    def with_function(report: dict[str, Any], number: int) -> dict[str, Any]:
        return {**report, "reward": {"of": lambda: number}}

    with pytest.raises(RankError, match=r"ValueError: losses\[0\]\['reward'\]\['of'\] cannot be copied \("):
        training.train(2, V_HALF, initialize=with_loss_function(with_function))
