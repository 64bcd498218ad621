"""Loops on megatron.core as trainers of reinforcement learning, of embeddings and of images have them.

They look for what the loss needs, and for what it makes, on the last pipeline rank, as most trainers do whose
stages stand in order.  As a program it writes what its ranks found to the file that it is given.

* ``policy``: a pass without a backward collects log-probabilities.  The last rank keeps them, makes
  advantages of them, and the losses of the next step read both there.
* ``masked``: each forward drops from its batch what another rank needs: labels and masks go to the rank that
  counts as the pipeline's last, by the group that the chunk has.
* ``measured``: an evaluation adds to a measure that the trainer keeps on every rank, and reads on the last.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks  # isort: skip (the stand-ins come before Megatron)

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.utils import get_attr_wrapped_model

import megatron_pp_ext
from tests.support import own_loop
from tests.support.few_trials import few_trials

COUNT = 5
SCHEDULES = {"stock": 1, "v-half": 2, "v-zb": 2, "zb-h1": 1}
"""What runs, and its chunks a rank."""


def policy(model: list[Any]) -> list[float]:
    """Return the losses of a step whose advantages come from an earlier pass."""
    rollout: dict[str, list[torch.Tensor]] = {}

    def collected(output: torch.Tensor, non_loss_data: bool = True) -> Any:
        return output.detach().mean(), {"log_probs": [output.detach().clone()]}

    def observe(iterator: Iterator[Any], chunk: Any) -> Any:
        return chunk(**next(iterator)), collected

    with torch.no_grad():
        outputs = own_loop.run_step(
            model, _iterators(model), COUNT, forward_step_func=observe, forward_only=True
        )
    if parallel_state.is_pipeline_last_stage():
        rollout["log_probs"] = [value for output_entry in outputs for value in output_entry["log_probs"]]
        baseline = torch.stack(rollout["log_probs"]).mean()
        rollout["advantages"] = [value - baseline for value in rollout["log_probs"]]
    calls = [0] * len(model)

    def learn(iterator: Iterator[Any], chunk: Any) -> Any:
        batch, at = next(iterator), getattr(chunk.module, "vp_stage", None) or 0
        number, calls[at] = calls[at], calls[at] + 1
        old, advantages = (
            [rollout[key][number]] if key in rollout else None for key in ("log_probs", "advantages")
        )

        def loss_of(output: torch.Tensor) -> Any:
            ratio = torch.exp(torch.cat(old) - output)  # type: ignore[arg-type]
            loss = (ratio * torch.cat(advantages)).mean()  # type: ignore[arg-type]
            return loss, {"loss": loss.detach().clone()}

        return chunk(**batch), loss_of

    return _losses(own_loop.run_step(model, _iterators(model), COUNT, forward_step_func=learn))


def masked(model: list[Any]) -> list[float]:
    """Return the losses of a step in which a rank that does not count as the last has no labels."""

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        batch = next(iterator)
        if not is_pp_last_stage(get_attr_wrapped_model(chunk, "pg_collection").pp):
            batch = {**batch, "labels": None}
        output, labels = chunk(**batch), batch["labels"]

        def loss_of(output: torch.Tensor) -> Any:
            loss = (output * (labels > 0)).sum() / (labels > 0).sum()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    return _losses(own_loop.run_step(model, _iterators(model), COUNT, forward_step_func=forward_step))


def measured(model: list[Any]) -> list[float]:
    """Return the measurements of an evaluation, of the outputs on the last rank."""
    measure: list[torch.Tensor] = []

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        batch = next(iterator)

        def loss_of(output: torch.Tensor) -> Any:
            measure.append(output.detach().clone())
            return output.mean(), {"loss": output.detach().mean()}

        return chunk(**batch), loss_of

    with torch.no_grad():
        own_loop.run_step(model, _iterators(model), COUNT, forward_step_func=forward_step, forward_only=True)
    if not parallel_state.is_pipeline_last_stage():
        return []
    return [float(torch.cat(measure).pow(2).mean())]


def told_by_groups(model: list[Any]) -> list[float]:
    """Return this process's rank in each chunk's pipeline group, and the ranks that the group gathers."""
    numbers: list[float] = []
    for chunk in model:
        group = get_attr_wrapped_model(chunk, "pg_collection").pp
        ranks: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(ranks, group.rank(), group=group)
        numbers += [group.rank(), *ranks]
    return numbers


LOOPS = {loop.__name__: loop for loop in (policy, masked, measured)}


def _iterators(model: list[Any]) -> list[Any]:
    return [own_loop.batches() for _ in model]


def _losses(entries: list[Any]) -> list[float]:
    return [float(entry["loss"]) for entry in entries]


def on_rank(rank: int, ranks: int) -> dict[tuple[str, str], Any]:
    """Return this rank's losses and gradients by schedule and loop."""
    own_loop.start(ranks)
    results: dict[tuple[str, str], Any] = {}
    for name, chunks in SCHEDULES.items():
        installed = megatron_pp_ext.installed(name, ranks=ranks, microbatches=COUNT)
        with nullcontext() if name == "stock" else installed:
            for loop in LOOPS:
                model = own_loop.build(chunks)
                for chunk in model:
                    chunk.zero_grad_buffer()
                groups = told_by_groups(model)
                losses = LOOPS[loop](model)
                gradients = {
                    key: parameter.main_grad.clone() for key, parameter in own_loop.global_parameters(model)
                }
                results[name, loop] = own_loop.Record([losses], gradients)
                results[name, "groups"] = groups
    return results


if __name__ == "__main__":
    file, ranks = sys.argv[1:]
    with few_trials(str(Path(file).parent)):
        Path(file).write_bytes(pickle.dumps(run_ranks(on_rank, int(ranks), int(ranks))))
