"""Under a V the losses of a step go to the last rank behind the gradients, in messages of tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training as megatron_training

from tests.support import training
from tests.support.comparison import stock

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


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_follow_the_gradients(per_token: bool) -> None:
    """Only a count of tokens, by which gradients are divided, has to come before them."""
    flags = ("--calculate-per-token-loss",) if per_token else ()
    first, last = training.train(2, [*V_HALF, *flags], initialize=listen, grab=noted_events)
    before = ["send"] if per_token else []
    step = [*before, "finalize_model_grads", "send"]
    # In the first step the form of the losses comes with them.  Neighbours have met before all that.
    expected = [*before, "finalize_model_grads", "send", "send", *step, *step]
    assert first.grabbed[-len(expected) :] == expected
    assert set(first.grabbed[: -len(expected)]) <= {"send"}
    assert last.losses == stock(2, *V_HALF[:2], *flags).losses
