"""What a training run reports: memory, statistics of updates, and the record of each step for ``mpp verify``.

Stock assumes 1F1B or its interleaved schedule, and a first rank with an embedding and no output layer.
"""

import copy
import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.training import get_args

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core.optimizer import updates_by_stage
from megatron_pp_ext.megatron.core.parameters import global_parameters
from megatron_pp_ext.megatron.patching import hook, substitute
from megatron_pp_ext.runtime import gradients_file
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import run_record
from megatron_pp_ext.schedule.simulate import simulate

_REPORT, _WHY = "megatron.training.theoretical_memory_usage", "a true report of theoretical memory"
_ACTIVATIONS = "args num_microbatches verbose"


@hook(f"{_REPORT}:compute_activation_memory", _ACTIVATIONS, _WHY)
@hook(f"{_REPORT}:compute_activation_memory_without_sp", _ACTIVATIONS, _WHY)
def activations_as_scheduled(
    stock: Callable[..., float], args: Namespace, num_microbatches: int | None, verbose: bool = False
) -> float:
    """Count the microbatches that the schedule has in flight on its fullest rank; bytes."""
    pipeline = requested.pipeline()
    if pipeline is None or pipeline.source is None or num_microbatches is None:
        return stock(args, num_microbatches, verbose)
    schedule = pipeline.source.schedule(num_microbatches)
    in_flight = max(simulate(schedule, Costs.unit(schedule.placement)).peak_microbatches)
    # Without chunks and a number of microbatches, stock counts as many microbatches as ranks.
    unscheduled = copy.copy(args)
    unscheduled.virtual_pipeline_model_parallel_size = None
    as_1f1b = stock(unscheduled, None, verbose)
    if verbose:
        print(f"Number of in-flight microbatches under {pipeline.name}: {in_flight:g}")
    return as_1f1b * in_flight / args.pipeline_model_parallel_size


@hook(f"{_REPORT}:compute_weight_and_optimizer_memory", "args verbose", _WHY)
def weights_of_embedding_and_head(
    stock: Callable[..., float], args: Namespace, verbose: bool = False
) -> float:
    """Count the output layer where a V puts it: on the rank with the embedding; bytes."""
    memory = stock(args, verbose)
    pipeline = requested.pipeline()
    if pipeline is None or not pipeline.has_embedding_with_head:
        return memory
    if verbose:
        print(f"Under {pipeline.name} the most loaded shard has the output layer, too")
    # A second matrix of the embedding's size, tied or not.
    doubled = copy.copy(args)
    doubled.padded_vocab_size *= 2
    return stock(doubled, False)


@hook(
    "megatron.training.utils:logical_and_across_model_parallel_group",
    ("input", "input group"),
    "updates of a pipeline that never flushes",
)
@hook(
    "megatron.training.utils:reduce_max_stat_across_model_parallel_group",
    ("stat", "stat group"),
    "logs of a pipeline that never flushes",
)
def keep_within_stage(stock: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return this rank's own value, which is that of all ranks of its stage."""
    return value if updates_by_stage() else stock(value, *args, **kwargs)


_NORM = 5
"""The place of the gradient norm in ``train_step``'s result; the losses by name come first."""


_PARAMETERS = (
    "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func "
    "iteration"
)


@substitute(
    "megatron.training.training:train_step",
    (_PARAMETERS, f"{_PARAMETERS} pg_collection p2p_communicator"),
    "losses and gradients that mpp verify compares",
)
def record_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Write down losses and gradient norm of every step, and the gradients of the first on request."""
    losses: list[dict[str, float]] = []
    norms: list[float | None] = []

    @functools.wraps(stock)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        flags = get_args()
        folder = getattr(flags, "verify_pipeline", None)
        if folder is None:
            return stock(*args, **kwargs)
        if flags.verify_pipeline_gradients and not norms:
            call = bound(stock, *args, **kwargs).arguments
            _before_next_step(call["optimizer"], functools.partial(_write_gradients, folder, call["model"]))
        result = stock(*args, **kwargs)
        losses.append({name: float(loss) for name, loss in result[0].items()})
        norms.append(None if result[_NORM] is None else float(result[_NORM]))
        run_record.write(folder, dist.get_rank(), losses, norms)
        return result

    return train_step


def _before_next_step(optimizer: Any, act: Callable[[], None]) -> None:
    """Call ``act`` when the gradients of the next step are final and before the optimizer uses them."""

    def step() -> Any:
        del optimizer.step  # the method of its class is there again
        act()
        return optimizer.step()

    optimizer.step = step


def _write_gradients(folder: Path, chunks: Sequence[Any]) -> None:
    """Write each gradient of which this rank has the first copy among its replicas."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.ddp_config.use_distributed_optimizer:
                _gather(group)
    first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    first_of_experts = mpu.get_expert_data_parallel_rank() == 0
    gradients = {}
    for name, parameter in global_parameters(chunks):
        gradient = getattr(parameter, "main_grad", None)
        is_expert = not getattr(parameter, "allreduce", True)
        if gradient is not None and (first_of_experts if is_expert else first):
            if hasattr(parameter, "rows_of_whole"):
                gradient = _joined(gradient)
            gradients[name + _part(is_expert)] = gradient.detach().cpu().clone()
    if gradients:
        gradients_file.write(folder, dist.get_rank(), gradients)


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks of the pipeline, in order, as stock's tensor-parallel rank has them."""
    group = mpu.get_pipeline_model_parallel_group()
    parts: list[torch.Tensor] = [rows] * group.size()
    dist.all_gather_object(parts, rows.detach().cpu(), group=group)
    return torch.cat(parts)


def _part(is_expert: bool) -> str:
    """Which part of a parameter this rank has, for its name."""
    if is_expert:
        ranks = {
            "expert": (mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
            "tensor": (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
        }
    else:
        ranks = {"tensor": (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())}
    return "".join(f" [{name} rank {rank}]" for name, (rank, size) in ranks.items() if size > 1)


def _gather(group: Any) -> None:
    """Make gradients whole of which a distributed optimizer has reduced only this rank's part."""
    replicas = group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        part = bucket.grad_data.chunk(replicas.size())[replicas.rank()]
        dist.all_gather_into_tensor(bucket.grad_data, part.clone(), group=replicas)
