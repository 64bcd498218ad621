"""Megatron's reports of a run (log lines, event files, timers, memory) are as right as under stock.

Under a V the first rank has the loss and the last rank prints it, and both copies of a tied weight are on one
rank, where norms and counts must take one of them.
"""

import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.timers import Timer
from megatron.training import get_args, theoretical_memory_usage, training
from megatron.training.utils import is_last_rank

from tests.support import rounding
from tests.support.training import initialize_by_layer, train

PIPELINE = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
SCHEDULES = {"stock": (), "v-half": ("--pipeline-schedule", "v-half")}
EVERYTHING = ("--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput")
CLOCK = ("elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)")


def printed(world: int, file: Path, *flags: str) -> list[dict[str, str]]:
    """The fields of every iteration line that the last rank printed."""

    def listen(chunks: list[torch.nn.Module]) -> None:
        initialize_by_layer(chunks)
        printer = training.print_rank_last

        def print_and_keep(text: str) -> None:
            printer(text)
            if is_last_rank():
                with file.open("a") as lines:
                    lines.write(text + "\n")

        training.print_rank_last = print_and_keep

    train(world, [*PIPELINE, *EVERYTHING, *flags], initialize=listen)
    return [dict(re.findall(r" ([^|:]+): +(\S+) \|", line)) for line in file.read_text().splitlines()]


@pytest.mark.wide
def test_iteration_lines(tmp_path: Path) -> None:
    """Losses, norms and counts agree to the last printed digit; clocks are there."""
    flags = ("--use-distributed-optimizer", "--bf16")
    stock, ours = (printed(4, tmp_path / name, *flags, *SCHEDULES[name]) for name in ("stock", "v-half"))
    assert len(stock) == 3
    assert {"lm loss", "grad norm", "params norm", "num zeros", "learning rate", *CLOCK} <= stock[0].keys()
    assert [line.keys() for line in ours] == [line.keys() for line in stock]
    assert [_timeless(line) for line in ours] == [_timeless(line) for line in stock]


def _timeless(line: dict[str, str]) -> dict[str, str]:
    return {field: value for field, value in line.items() if field not in CLOCK}


def test_event_files_and_timers(tmp_path: Path) -> None:
    """Tags, steps and values: the losses to the bit, norms within what another order of summing leaves."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = [*PIPELINE, *EVERYTHING, "--tensorboard-log-interval", "1", "--log-memory-to-tensorboard"]
    flags += ["--log-timers-to-tensorboard", "--timing-log-level", "2", "--timing-log-option", "all"]
    flags += ["--eval-interval", "3", "--eval-iters", "1", "--log-validation-ppl-to-tensorboard"]
    scalars = {}
    for name in ("stock", "v-half"):
        words = [*flags, *SCHEDULES[name], "--tensorboard-dir", str(tmp_path / name)]
        ranks = train(2, words, initialize=count_starts, grab=starts_of_timers)
        _require_starts([rank.grabbed for rank in ranks], *((2, 2) if name == "v-half" else (1, 1)))
        file = events.EventAccumulator(str(tmp_path / name)).Reload()
        tags = file.Tags()["scalars"]
        scalars[name] = {tag: [(event.step, event.value) for event in file.Scalars(tag)] for tag in tags}
    stock, ours = scalars["stock"], scalars["v-half"]
    assert {"lm loss", "learning-rate", "grad-norm", "params-norm", "lm loss validation"} <= stock.keys()
    # Stock times its messages, which wait for each other; ours are under way while a rank computes.
    ours = {tag: values for tag, values in ours.items() if not tag.startswith("pipeline/")}
    assert ours.keys() == {tag for tag in stock if not re.search("send|recv", tag)}
    for tag in ours:
        assert [step for step, _ in ours[tag]] == [step for step, _ in stock[tag]]
        if "time" not in tag and "throughput" not in tag:
            same = [pytest.approx(value, rel=rounding.relative()) for _, value in stock[tag]]
            assert [value for _, value in ours[tag]] == same, tag


def starts_of_timers(chunks: list[torch.nn.Module]) -> Counter[str]:
    """How often each timer was started in the first step."""
    return Counter(Timer.counted)


def count_starts(chunks: list[torch.nn.Module]) -> None:
    initialize_by_layer(chunks)
    Timer.counted = Counter()
    start = Timer.start

    def counted(self: Timer, *args: Any, **kwargs: Any) -> None:
        Timer.counted[self.name] += 1
        start(self, *args, **kwargs)

    Timer.start = counted


def _require_starts(of_ranks: list[Counter[str]], chunks: int, halves: int) -> None:
    """A whole backward is timed once, one in two halves twice, and forward-backward covers them all."""
    for starts in of_ranks:
        assert starts["forward-backward"] == 1
        assert starts["forward-compute"] == 8 * chunks
        assert starts["backward-compute"] == 8 * chunks * halves


def report(chunks: list[torch.nn.Module]) -> tuple[float, float, float, Namespace]:
    """Bytes of weights and optimizer, of activations with and without sequence parallelism."""
    args = get_args()
    return (
        theoretical_memory_usage.compute_weight_and_optimizer_memory(args),
        theoretical_memory_usage.compute_activation_memory(args, 8),
        theoretical_memory_usage.compute_activation_memory_without_sp(args, 8),
        args,
    )


def test_theoretical_memory() -> None:
    short = ("--pipeline-model-parallel-size", "4", "--train-iters", "1", "--global-batch-size", "4")
    stock, ours = (train(4, [*short, *SCHEDULES[name]], grab=report) for name in ("stock", "v-half"))
    *theirs, args = stock[0].grabbed
    weights, *activations, _ = ours[0].grabbed
    # V-Half keeps floor((p + 2) / 2) whole stages of its four ranks' 1F1B; 1F1B keeps p.
    assert activations == pytest.approx([3 / 4 * size for size in theirs[1:]])
    # 18 bytes a parameter: bf16 weight, fp32 gradient, weight and two moments.
    assert weights == theirs[0] + 18 * args.hidden_size * args.padded_vocab_size
