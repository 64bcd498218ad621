"""Among our actions the host waits for its device where it does under stock, and for no check of numbers.

On a GPU each of the calls that are counted here waits until the device has done all that was launched before.
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.cli.rehearse import environment, rehearsal_flags
from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.megatron.runners import pipeline_runner
from megatron_pp_ext.planner import described
from megatron_pp_ext.runtime import executor
from tests.support import training
from tests.support.ranks import RankError, run_ranks
from tests.support.tiers import first

WAITING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu", "numpy")
CHECK = "rerun_state_machine.validate_result"


@dataclass
class HostWaits:
    """The waits of one step's pipeline by the function that waits: among our actions, and all others."""

    among: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def next_step(self, _: list[torch.nn.Module]) -> None:
        """Count from the second step's end on: until then ranks still agree on what they run."""
        self.steps += 1
        if self.steps == 2:
            for name in WAITING:
                setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
            torch.cuda.synchronize = self._counted(torch.cuda.synchronize)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            frames = [frame.f_code for frame in _frames(sys._getframe(1))]
            files = {code.co_filename for code in frames}
            stock = any(code.co_name.startswith("forward_backward_pipelining") for code in frames)
            if stock or pipeline_runner.__file__ in files:
                place = next(code for code in frames if "/torch/" not in code.co_filename)
                found = self.among if executor.__file__ in files else self.beside
                found[f"{Path(place.co_filename).stem}.{place.co_name}"] += 1
            return function(*args, **kwargs)

        return counting


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def host_waits(rank: int, flags: Sequence[str]) -> HostWaits:
    """Train the tiny GPT as ``rank`` and return the waits of the third step."""
    waits = HostWaits()
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *flags])
    hooks = (training.initialize_by_layer, lambda _: None, waits.next_step)
    training._train(rank, argv, *hooks)
    return HostWaits(waits.among, waits.beside)


PP2 = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
ON_A_LINE = ("zb-h1", "pipedream-2bw")
EXPERTS = ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear")


@functools.cache
def waits(world_size: int, *flags: str) -> list[HostWaits]:
    return run_ranks(host_waits, world_size, [*PP2, *flags])


def total(found: list[Counter[str]]) -> Counter[str]:
    return sum(found, Counter())


@pytest.mark.parametrize(
    ("world_size", "features", "ours"),
    first(
        2,
        [
            (2, (), "v-half --pipeline-vocabulary shared"),
            (2, (), "pipedream-2bw"),
            (4, OVERLAP, "v-half"),
            (2, EXPERTS, "dualpipe-v"),
        ],
    ),
)
def test_the_host_waits_where_stock_waits(world_size: int, features: tuple[str, ...], ours: str) -> None:
    theirs = total([one.beside for one in waits(world_size, *features)])
    found = waits(world_size, *features, "--pipeline-schedule", *ours.split())
    among, beside = total([one.among for one in found]), total([one.beside for one in found])
    assert theirs[CHECK]
    assert among <= theirs - Counter({CHECK: theirs[CHECK]})
    # Behind the actions stand the checks, as many as stock's or, of two chunks' buckets, more; under a V the
    # losses arrive there.
    checks = beside.pop(CHECK)
    assert checks == theirs[CHECK] if ours in ON_A_LINE else checks > theirs[CHECK]
    assert beside <= Counter({"object_send.receive": world_size // 2})


def test_a_rehearsal_waits_as_training_does(tmp_path: Path) -> None:
    """And makes the checks that Megatron drops beside its fake process group."""
    flags = [*PP2, "--pipeline-schedule", "v-half"]

    def alone(rank: int) -> HostWaits:
        asked = described.read([*training.TINY, *flags], None).job
        os.environ.update(environment(asked, rank, smallest_world(asked)))
        return host_waits(rank, rehearsal_flags(flags, 2, tmp_path / f"{rank}.json"))

    for found, real in zip(run_ranks(alone, 2), waits(2, *flags[3:]), strict=True):
        assert found.among == real.among
        assert found.beside[CHECK] == real.beside[CHECK] > 0


def spoil(chunks: list[torch.nn.Module]) -> None:
    """After the first update with it the weights are infinite, and the third step's losses no numbers."""
    with torch.no_grad():
        next(chunks[-1].parameters()).mul_(torch.inf)


def test_a_loss_that_is_not_finite_ends_the_job() -> None:
    """In the same step as stock's, before the optimizer uses its gradients."""
    flags = ("--pipeline-schedule", "v-half", "--rerun-mode", "disabled")
    with pytest.raises(RankError, match=r"iteration 3: Unexpected result nan \(message='the loss"):
        training.train(2, [*PP2, *flags], disturb=spoil)
