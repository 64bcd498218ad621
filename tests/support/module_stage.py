"""A pipeline stage made of an ordinary torch module."""

from collections.abc import Callable

import torch

from megatron_pp_ext.runtime.split import STORE, Owner


class ModuleStage:
    """Runs ``module`` as stage number ``stage``.

    ``first_inputs(microbatch)`` returns the data of the first stage.  ``loss(output, microbatch)`` turns the
    last stage's output into the scalar to differentiate, and ``losses`` collects its values.
    Only the weight gradients of ``SplitLinear`` layers are deferred to W.
    """

    def __init__(
        self,
        stage: int,
        module: torch.nn.Module,
        first_inputs: Callable[[int], torch.Tensor] | None = None,
        loss: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> None:
        self.stage, self.module = stage, module
        self.first_inputs, self.loss = first_inputs, loss
        self.losses: dict[int, float] = {}
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """See ``rank.Stage``."""
        if activation is None:
            if self.first_inputs is None:
                raise ValueError(f"stage {self.stage} got no activation: give the first stage first_inputs")
            activation = self.first_inputs(microbatch)
        else:
            activation.requires_grad_()
        output = self.module(activation)
        if self.loss is not None:
            output = self.loss(output, microbatch)
            self.losses[microbatch] = output.item()
        self._in_flight[microbatch] = activation, output
        return output

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See ``rank.Stage``."""
        activation, output = self._in_flight.pop(microbatch)
        torch.autograd.backward(output, grad_tensors=gradient)
        return activation.grad

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See ``rank.Stage``."""
        with STORE.collecting(Owner(self.stage, microbatch)):
            return self.backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """See ``rank.Stage``."""
        STORE.run(Owner(self.stage, microbatch))
