"""A small GPT that learns text on the CPU: its flags, and the losses and seconds of its updates."""

import time
from statistics import mean
from typing import NamedTuple

import torch

from megatron_pp_ext.launch import install
from megatron_pp_ext.text_data import VOCAB_SIZE
from tests.support import training
from tests.support.delayed import Reference

LAST = 0.15
"""The part of the samples over which a run's last losses are averaged."""


LAYERS, MICROBATCH = 4, 4


def model(hidden: int, tokens: int) -> list[str]:
    """Return the flags of a GPT of this hidden size that learns samples of ``tokens`` at a constant rate."""
    return (
        f"--untie-embeddings-and-output-weights --num-layers {LAYERS} --hidden-size {hidden} "
        f"--num-attention-heads 4 --seq-length {tokens} --max-position-embeddings {tokens} "
        f"--micro-batch-size {MICROBATCH} --attention-dropout 0 --hidden-dropout 0 --clip-grad 0 "
        f"--lr-decay-style constant --eval-iters 0 --eval-interval 100000 --log-interval 100000 "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0 "
        "--distributed-timeout-minutes 5"
    ).split()


class Curve(NamedTuple):
    """The loss of every update, and the seconds after which it was done."""

    losses: list[float]
    seconds: list[float]

    @property
    def last(self) -> float:
        """The mean loss of the last samples."""
        return mean(self.losses[-max(1, round(LAST * len(self.losses))) :])

    @property
    def smooth(self) -> list[float]:
        """After every update the mean of as many losses, of fewer at the start."""
        width = max(1, round(LAST * len(self.losses)))
        return [mean(self.losses[max(0, end - width) : end]) for end in range(1, len(self.losses) + 1)]

    def updates_to(self, loss: float) -> int | None:
        """Return the updates until the mean of as many losses was ``loss``; None if it never was."""
        width = max(1, round(LAST * len(self.losses)))
        ends = range(width, len(self.losses) + 1)
        return next((end for end in ends if mean(self.losses[end - width : end]) <= loss), None)

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds until then; None if it never was."""
        updates = self.updates_to(loss)
        return self.seconds[updates - 1] if updates else None


def learning_curve(rank: int, argv: list[str], reference: tuple | None) -> Curve:
    """Train as one rank, or as the single process that follows ``reference``."""
    torch.set_num_threads(1)
    install()
    ends: list[float] = []
    if reference:
        Reference(*reference).take_over()
    step = training.training.train_step

    def timed_step(*args, **kwargs):
        if not ends:
            ends.append(time.perf_counter())
        result = step(*args, **kwargs)
        ends.append(time.perf_counter())
        return result

    training.training.train_step = timed_step
    losses = training._train(rank, argv, training.initialize_by_layer, None).losses
    return Curve(losses, [end - ends[0] for end in ends[1:]])
