"""The measured numbers of the pipeline in the logs of Megatron-Bridge, ms-swift and verl.

Each trainer calls the hooked function on all ranks of a pipeline, after the same step, and so they meet.
Nothing is added for a model under Megatron's own schedule, nor after ``InForce.without_log``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.step_numbers import completed, measured_while_logging

_LOGGED = (
    "loss_dict total_loss_dict learning_rate decoupled_learning_rate loss_scale report_memory_flag "
    "skipped_iter grad_norm params_norm num_zeros_in_grad config global_state history_wct model"
)


def _timed(model: Sequence[torch.nn.Module]) -> Pipeline | None:
    """Return the pipeline of ``model``, whose steps are timed from the first call on.

    None where its numbers do not go into a log.
    """
    chunks = unwrap_model(list(model))
    is_of_core = all(isinstance(chunk, MegatronModule) for chunk in chunks)
    pipeline = chunk_pipelines.of_model(chunks) if is_of_core else None
    if pipeline is None or not pipeline.last_step.is_logged:
        return None
    pipeline.last_step.is_wanted = True
    return pipeline


@hook(
    "megatron.bridge.training.utils.train_utils:training_log",
    (
        f"{_LOGGED} log_max_attention_logit",
        f"{_LOGGED} pg_collection log_max_attention_logit loaded_iteration seq_length",
    ),
    "the measured numbers of the pipeline in Megatron-Bridge's log",
)
def log_of_bridge(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Measure the last step at every ``log_interval`` of Megatron-Bridge; collective, as its own log is."""
    call = bound(stock, *args, **kwargs).arguments
    state, pipeline = call["global_state"], _timed(call["model"])
    iteration = state.train_state.step
    if pipeline is None or iteration % call["config"].logger.log_interval:
        return stock(*args, **kwargs)
    result, numbers = measured_while_logging(pipeline, partial(stock, *args, **kwargs))
    if numbers:
        _write(state, numbers, iteration)
    return result


@hook(
    "megatron.bridge.utils.common_utils:print_rank_last",
    "message",
    "the measured numbers of the pipeline in Megatron-Bridge's line of an iteration",
)
def print_fields(stock: Callable[[str], None], message: str) -> None:
    """Append the fields to the line of an iteration."""
    stock(completed(message))


def _write(state: Any, numbers: Mapping[str, float], iteration: int) -> None:
    """Write ``numbers`` to each writer of Megatron-Bridge, on the rank that has them."""
    if state.tensorboard_logger:
        for name, number in numbers.items():
            state.tensorboard_logger.add_scalar(name, number, iteration)
    if state.wandb_logger:
        state.wandb_logger.log(dict(numbers), iteration)
    if state.mlflow_logger:
        # Bridge's own names have no "/" there either.
        state.mlflow_logger.log_metrics(
            {name.replace("/", "_"): number for name, number in numbers.items()}, step=iteration
        )
    if state.comet_logger:
        state.comet_logger.log_metrics(dict(numbers), step=iteration)


@hook(
    "swift.megatron.trainers.base:BaseMegatronTrainer.on_log",
    "self logs prefix",
    "the measured numbers of the pipeline in ms-swift's log",
)
def log_of_swift(stock: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Add the numbers to those that ms-swift hands to its callbacks; an evaluation has a prefix."""
    call = bound(stock, trainer, *args, **kwargs).arguments
    pipeline = None if call.get("prefix") else _timed(trainer.wrapped_models)
    if pipeline is not None:
        call["logs"].update(pipeline.last_step.numbers())
    stock(trainer, *args, **kwargs)


@hook(
    "verl.workers.engine_workers:TrainingWorker.train_batch",
    "self data",
    "the measured numbers of the pipeline in verl's metrics of an update",
)
def log_of_verl(stock: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the numbers to the metrics of an update, which one rank of each replica returns."""
    result = stock(worker, *args, **kwargs)
    module = getattr(worker.engine, "module", None)
    pipeline = _timed(module) if isinstance(module, list) else None
    if pipeline is not None:
        numbers = pipeline.last_step.numbers()
        if result is not None:
            result["metrics"].update(numbers)
    return result
