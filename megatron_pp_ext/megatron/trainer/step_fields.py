"""The measured numbers of the pipeline in Megatron's log: the line of an iteration, TensorBoard and W&B."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_pp_ext.around import bound
from megatron_pp_ext.costs.system import peak_of_device
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.patching import hook
from megatron_pp_ext.megatron.step_numbers import MFU, completed, line_in_progress, measured_while_logging

_LOGGED = (
    "loss_dict total_loss_dict learning_rate iteration loss_scale report_memory_flag skipped_iter grad_norm "
    "params_norm num_zeros_in_grad max_attention_logit pg_collection is_first_iteration"
)


@hook(
    "megatron.training.training:training_log",
    (_LOGGED, f"{_LOGGED} seqlen_squared_sum_in_batch total_real_tokens_in_batch"),
    "the measured numbers of the pipeline in Megatron's log",
)
def log_step(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Measure the last step at every --log-interval; collective, as Megatron's own log is."""
    pipeline = requested.pipeline()
    if pipeline is None or not pipeline.last_step.is_wanted:
        return stock(*args, **kwargs)
    call = bound(stock, *args, **kwargs).arguments
    iteration = call["iteration"]
    is_at_interval = iteration % get_args().log_interval == 0
    if not is_at_interval and not call.get("is_first_iteration"):
        return stock(*args, **kwargs)
    result, numbers = measured_while_logging(pipeline, partial(stock, *args, **kwargs))
    if numbers and is_at_interval:
        _write(numbers, iteration)
    return result


@hook(
    "megatron.training.utils:print_rank_last",
    "message",
    "the measured numbers of the pipeline in Megatron's line of an iteration",
)
def print_fields(stock: Callable[[str], None], message: str) -> None:
    """Append the fields to the line of an iteration, the one that Megatron prints in ``training_log``."""
    stock(completed(message))


@hook(
    "megatron.training.one_logger_utils:track_e2e_metrics",
    "log_throughput throughput",
    "the throughput by Megatron's formula, of which MFU is a part",
)
def add_utilisation(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Divide the throughput, in TFLOP/s of a GPU, which Megatron computes before it prints the line."""
    throughput = bound(stock, *args, **kwargs).arguments.get("throughput")
    line = line_in_progress()
    if line is not None and throughput is not None:
        precision = RequestedJob.of_args(get_args(), {}).precision
        peak = peak_of_device(torch.cuda.get_device_name(), precision.format)
        if peak is not None:
            line.numbers[MFU] = throughput * 1e12 / peak
    return stock(*args, **kwargs)


def _write(numbers: Mapping[str, float], iteration: int) -> None:
    """Write ``numbers`` to TensorBoard and W&B, on the rank that has them."""
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, number in numbers.items():
            writer.add_scalar(name, number, iteration)
    if wandb:
        wandb.log(dict(numbers), iteration)
