"""A stage made of a Megatron model chunk."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron_pp_ext.megatron.core.data_parallel import DataParallel, LastActions, last_actions
from megatron_pp_ext.megatron.core.placed_models import as_chunk
from megatron_pp_ext.runtime.channels import Shape
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.schedule.actions import Action, Announced, Kind
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.setting_error import SettingError

_WANTED = inspect.signature(stock_schedules.backward_step).parameters
# Before 0.17 the function takes the type of the model, and does nothing with it.
_UNUSED = {"model_type": None} if "model_type" in _WANTED else {}


def backward_of_stock(
    activation: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None, config: Any
) -> Any:
    """Run the backward of ``output``; return the gradient of ``activation``, the input, if it has one."""
    return stock_schedules.backward_step(activation, output, gradient, config=config, **_UNUSED)


ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any] | None]]
"""A script's forward step: (data iterator, model) -> (output, loss function)."""


def step_of_one_call(
    forward_step: ForwardStep, iterator: Any, model: torch.nn.Module, flag: str
) -> tuple[torch.Tensor, Callable[..., Any] | None]:
    """Run a ``forward_step`` that calls its model once and does not change its output; return its result.

    ValueError for any other: with ``flag`` the forward step depends on the output as it is.
    """
    outputs = list[tuple[Any, Any, Any]]()

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        outputs.append((module, output, _writes(output)))

    handles = [part.register_forward_hook(note) for part in _wrapped(model)]
    try:
        output, loss_function = forward_step(iterator, model)
    finally:
        for handle in handles:
            handle.remove()
    calls = max(Counter(module for module, *_ in outputs).values(), default=0)
    if calls != 1:
        raise SettingError(
            f"{flag} needs a forward step that calls its model once for a microbatch, and this one called it "
            f"{calls} times; leave it out"
        )
    if not any(output is candidate and _is_as_written(candidate, writes) for _, candidate, writes in outputs):
        raise SettingError(
            f"{flag} needs a forward step which returns what the model returns, and this one changes it; do "
            "so in the loss function, or leave it out"
        )
    return output, loss_function


def _wrapped(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``model`` and its wrapped modules, down to the innermost."""
    inner, parts = unwrap_model(model), [model]
    while parts[-1] is not inner:
        parts.append(parts[-1].get_submodule("module"))
    return parts


def _writes(output: Any) -> Any:
    """Return a state that changes with a tensor: a copy where torch counts no writes (inference mode)."""
    if not isinstance(output, torch.Tensor):
        return None
    return output.clone() if output.is_inference() else (output._version, output.data_ptr())


def _is_as_written(output: Any, writes: Any) -> bool:
    if isinstance(writes, torch.Tensor):
        return torch.allclose(output, writes, rtol=0, atol=0, equal_nan=True)
    return bool(_writes(output) == writes)


@dataclass
class StepInputs:
    """The arguments that Megatron passes for one step, and the losses and tokens that the stages add.

    ``group`` is the pipeline's, one of Megatron's ``groups``, and ``shape`` its messages' shape, empty where
    these differ; ``shapes`` are then each unit's, if they are known before the step.  Announced shapes are
    added to ``announced`` where somebody wants to know.  Where a microbatch ``has_one_shape`` on all stages,
    a rank is sent it once (``Announced.FIRST``).
    ``training_steps`` is the number of training steps that this process has run before, and ``samples`` those
    of a microbatch.
    """

    forward_step_func: ForwardStep
    group: dist.ProcessGroup
    groups: ProcessGroupCollection
    shape: Any
    model: list[torch.nn.Module]
    iterators: list[Any]
    microbatches: int
    config: Any
    cp_size: int
    data_parallel: DataParallel
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    training_steps: int = 0
    samples: int = 1
    shapes: Sequence[Shape] = ()
    announced: dict[int, set[Shape]] | None = None
    has_one_shape: bool = False
    losses: list[Any] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.zeros([], dtype=torch.int, device="cuda"))

    @property
    def announces(self) -> Announced:
        """The activations that announce their shapes."""
        if self.shape or self.shapes:
            return Announced.NOTHING
        return Announced.FIRST if self.has_one_shape else Announced.EVERY


def model_stages[S: ModelStage](
    inputs: StepInputs, placement: Placement, plan: RankPlan, make: Callable[..., S]
) -> dict[int, S]:
    """Return the stages of this rank, by number, for one step; ``make`` takes ``ModelStage``'s arguments."""
    last = last_actions(plan.actions)
    return {
        stage: make(
            inputs,
            stage,
            chunk,
            vp_stage=chunk if placement.chunks > 1 else None,
            is_last=stage == placement.stages - 1,
            last=last.get(stage),
        )
        for chunk, stage in enumerate(placement.stages_of(plan.rank))
    }


class ModelStage:
    """One chunk of the model as a ``rank.Stage``; ``inputs`` and ``last`` belong to the running step.

    Forward and backward of a microbatch are Megatron's own ``forward_step`` and ``backward_step``,
    which bring loss scaling, autocast and timers with them.  ``in_flight`` keeps the input and the output of
    every microbatch between the two.
    """

    def __init__(
        self,
        inputs: StepInputs,
        stage: int,
        chunk: int,
        vp_stage: int | None,
        is_last: bool,
        last: LastActions | None,
    ) -> None:
        self.inputs = inputs
        self._stage, self._chunk = stage, chunk
        self._vp_stage, self._is_last = vp_stage, is_last
        self.last = last
        self.in_flight: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """See ``rank.Stage``; on the last stage the loss goes to the loss store as well."""
        self.before_forward(microbatch, activation)
        output, tokens = self._forward(microbatch, activation)
        return self.after_forward(microbatch, activation, output, tokens)

    def before_forward(self, microbatch: int, activation: torch.Tensor | None) -> None:
        """Prepare the input of a forward, and begin to gather the weights that are needed next."""
        inputs = self.inputs
        if activation is not None and self._gives_gradient and not inputs.forward_only:
            activation.requires_grad_()
            if inputs.config.distribute_saved_activations:
                from megatron_pp_ext.runtime.activation_meter import keep_shape

                keep_shape(activation)
        if microbatch == 0:
            inputs.data_parallel.first_forward(self._chunk)

    def _forward(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the output, and the number of tokens that the loss is of."""
        return self._stock_forward(self.inputs.forward_step_func, microbatch, activation)

    def _stock_forward(
        self,
        forward_step: ForwardStep,
        microbatch: int,
        activation: torch.Tensor | None,
        losses: list[Any] | None = None,
        microbatches: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Run Megatron's own ``forward_step``, which adds to ``losses`` and divides by ``microbatches``.

        By default these are the step's.
        """
        inputs = self.inputs
        with self.at_work():
            return stock_schedules.forward_step(
                forward_step,
                inputs.iterators[self._chunk],
                inputs.model[self._chunk],
                microbatches or inputs.microbatches,
                activation,
                inputs.losses if losses is None else losses,
                inputs.config,
                cp_group_size=inputs.cp_size,
                collect_non_loss_data=inputs.collect_non_loss_data,
                is_first_microbatch=self.is_first(microbatch),
                current_microbatch=microbatch,
                vp_stage=self._vp_stage,
                is_last_stage=self._is_last,
            )

    def after_forward(
        self,
        microbatch: int,
        activation: torch.Tensor | None,
        output: torch.Tensor,
        tokens: torch.Tensor | int,
    ) -> torch.Tensor:
        """Keep the tensors for the backward, and return the next stage's input."""
        inputs = self.inputs
        inputs.tokens += tokens
        if inputs.forward_only:
            return output
        handed_on: torch.Tensor = output.detach()
        # The backward needs the graph of `output`, but not its numbers.
        stock_schedules.deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)
        self.in_flight[microbatch] = activation if self._gives_gradient else None, output
        return handed_on

    @property
    def _gives_gradient(self) -> bool:
        """Whether a backward has to give the gradient of the stage's input, where it has one."""
        return self._stage > 0

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context in which Megatron answers for this stage's chunk."""
        return as_chunk(self._vp_stage)

    def is_first(self, microbatch: int) -> bool | None:
        """Return whether weights have changed since the forward before; see ``check_first_val_step``."""
        inputs = self.inputs
        return stock_schedules.check_first_val_step(
            inputs.first_val_step, inputs.forward_only, microbatch == 0
        )

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.during_backward(Kind.B, microbatch):
            return self._backward(microbatch, gradient)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.during_backward(Kind.I, microbatch):
            return self._backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        clock = timed(self.inputs.config, "backward-compute", level=2)
        with self._counted(Kind.W, microbatch), clock:
            STORE.run(Owner(self._stage, microbatch))

    @contextmanager
    def during_backward(self, kind: Kind, microbatch: int, in_parts: bool = False) -> Iterator[None]:
        """Surround an I or a B: data parallelism counts it, and an I leaves its weight gradients.

        A B that runs ``in_parts`` leaves them to ``STORE.run_part``, a part at a time.
        """
        in_parts = in_parts and kind is Kind.B
        collects = kind is Kind.I or in_parts
        collecting = STORE.collecting(Owner(self._stage, microbatch), in_parts) if collects else nullcontext()
        with self._counted(kind, microbatch), collecting:
            yield

    def _counted(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        assert self.last is not None
        action = Action(self._stage, kind, microbatch)
        return self.inputs.data_parallel.backward(self._chunk, action, self.last)

    def _backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        activation, output = self.in_flight.pop(microbatch)
        with self.at_work():
            input_gradient: torch.Tensor | None = backward_of_stock(
                activation, output, gradient, self.inputs.config
            )
            return input_gradient


@contextmanager
def timed(config: Any, name: str, level: int, barrier: bool = False) -> Iterator[None]:
    """Add to one of the timers that --timing-log-level prints; ``barrier`` waits for all ranks first.

    Stock's ``forward_step`` and ``backward_step`` time themselves.
    """
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=level).start(barrier=barrier)
    try:
        yield
    finally:
        config.timers(name).stop()


def stop_timers(config: Any) -> None:
    """Stop the timers that stock's ``forward_step`` and ``backward_step`` leave running where they fail."""
    for name in ("forward-compute", "backward-compute") if config.timers is not None else ():
        config.timers(name, log_level=2).reset()
