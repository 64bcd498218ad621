"""Among our actions the host waits for its device where it does under stock, and for no check of numbers."""

import functools
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.cli.rehearse import environment, rehearsal_flags
from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.planner import described
from tests.support import training
from tests.support.host_waits import CHECK, HostWaits, host_waits
from tests.support.ranks import RankError, run_ranks
from tests.support.tiers import first

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
        3,
        [
            (2, (), "v-half"),
            (2, (), "v-half --pipeline-vocabulary shared"),
            (2, (), "pipedream-2bw"),
            (4, OVERLAP, "zb-h1"),
            (4, OVERLAP, "v-half"),
            (2, EXPERTS, "zb-h1"),
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
    assert beside <= Counter({"parcel.receive": world_size // 2})


def test_a_rehearsal_waits_as_training_does(tmp_path: Path) -> None:
    """And makes the checks that Megatron drops beside its fake process group."""
    flags = [*PP2, "--pipeline-schedule", "v-half"]

    def alone(rank: int) -> HostWaits:
        asked = described.read([*training.TINY, *flags], None).asked
        os.environ.update(environment(asked, rank, smallest_world(asked.job)))
        return host_waits(rank, rehearsal_flags(flags, 2, tmp_path / f"{rank}.json"))

    for found, real in zip(run_ranks(alone, 2), waits(2, *flags[3:]), strict=True):
        assert found.among == real.among
        assert found.beside[CHECK] == real.beside[CHECK] > 0


def spoil(chunks: list[torch.nn.Module]) -> None:
    """After the first update with it the weights are infinite, and the third step's losses no numbers."""
    with torch.no_grad():
        next(chunks[-1].parameters()).mul_(torch.inf)


@pytest.mark.parametrize("ours", [(), ("--pipeline-schedule", "v-half")], ids=["stock", "v-half"])
def test_a_loss_that_is_not_finite_ends_the_job(ours: tuple[str, ...]) -> None:
    """In the same step, before the optimizer uses its gradients."""
    with pytest.raises(RankError, match=r"iteration 3: Unexpected result nan \(message='the loss"):
        training.train(2, [*PP2, *ours, "--rerun-mode", "disabled"], disturb=spoil)
