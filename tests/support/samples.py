"""Which samples a run trains on: a line for each microbatch, written where its loss is computed."""

from pathlib import Path

import torch
from megatron.training import get_args

from megatron_pp_ext import pretrain_gpt


def note_samples(file: Path) -> None:
    """Have this rank append a line for each training loss: the number of its step and its first tokens."""
    get_batch, loss_func = pretrain_gpt.get_batch, pretrain_gpt.loss_func
    labels: list[torch.Tensor] = []

    def noted_batch(iterator, vp_stage):
        rows = get_batch(iterator, vp_stage)
        labels.append(rows["labels"])
        return rows

    def noted_loss(*args):
        if torch.is_grad_enabled():  # not in an evaluation
            with file.open("a") as log:
                log.write(f"{get_args().curr_iteration} {labels[-1][0, :8].tolist()}\n")
        return loss_func(*args)

    pretrain_gpt.get_batch, pretrain_gpt.loss_func = noted_batch, noted_loss


def samples_of(file: Path) -> dict[int, list[str]]:
    """Return the first tokens of each sample in ``file``, by the number of the step that it was noted in."""
    samples: dict[int, list[str]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        step, _, tokens = line.partition(" ")
        samples.setdefault(int(step), []).append(tokens)
    return samples
