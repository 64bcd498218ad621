"""--overlap-param-gather-with-optimizer-step: the same weights with it, and turned off where it has no use.

With --defer-embedding-wgrad-compute, which every schedule turns off.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import megatron_pp_ext
from megatron_pp_ext.megatron import releases
from megatron_pp_ext.megatron.core import optimizer
from tests.support import own_loop
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.ranks import run_ranks
from tests.support.tiers import first
from tests.support.training import global_parameters, since, train

EARLY = "--overlap-param-gather-with-optimizer-step"
DEFER = "--defer-embedding-wgrad-compute"
PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
GATHER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
UNALIGNED = "--no-align-grad-reduce --no-align-param-gather"
UNCLIPPED = ("--clip-grad", "0")
"""Otherwise the norm's last bits, whose sum goes by optimizer, are in the weights."""
LEGACY = ("--ckpt-format", "torch")
"""The format without which Megatron refuses the flag."""
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights"
)


class LastWeights:
    """Writes every rank's weights after five updates, while the gradients of the sixth step are final."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps = folder, 0

    def __call__(self, chunks: list[torch.nn.Module]) -> None:
        self._steps += 1
        if self._steps == 6:
            weights = {name: weight.detach().clone() for name, weight in global_parameters(chunks)}
            torch.save(weights, self._folder / f"{dist.get_rank()}.pt")


def trained(folder: Path, *flags: str) -> list[dict[str, torch.Tensor]]:
    """Return the weights of each of four ranks after five steps of seven microbatches a replica."""
    folder.mkdir()
    steps = ("--train-iters", "6", "--global-batch-size", "14")
    train(4, [*PP2, *GATHER, *UNCLIPPED, *LEGACY, *steps, *flags], disturb=LastWeights(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize(
    "schedule",
    first(
        1,
        [
            "v-half",
            f"v-zb {UNALIGNED}",
            "interleaved",
            f"dualpipe-v --bf16 {UNALIGNED}",
            "flex --pipeline-memory-limit 0.7",
            "v-min --pipeline-vocabulary shared --untie-embeddings-and-output-weights",
            pytest.param(
                "v-half --pipeline-slice-tokens 16",
                marks=since(releases.CORE_0_18, "slices need its log of auxiliary losses"),
            ),
            "v-half --eval-interval 2 --eval-iters 1",
            "zb-h1",
        ],
    ),
)
def test_the_weights_are_those_without_it(schedule: str, tmp_path: Path) -> None:
    flags = ("--pipeline-schedule", *schedule.split())
    early, theirs = trained(tmp_path / "early", *flags, EARLY), trained(tmp_path / "theirs", *flags)
    for ours, expected in zip(early, theirs, strict=True):
        assert ours.keys() == expected.keys()
        assert [name for name, weight in ours.items() if not torch.equal(weight, expected[name])] == []


@pytest.mark.parametrize(
    "flags",
    first(
        1,
        [
            "--pipeline-schedule v-half",
            f"--pipeline-schedule v-half {UNALIGNED}",
            "--num-virtual-stages-per-pipeline-rank 2",
        ],
    ),
)
def test_experts_are_gathered_after_their_update(flags: str) -> None:
    """Two replicas of each expert: the second loss shows the weights of all after the first update."""
    base = (*PP2, *EXPERTS.split(), *GATHER, *UNCLIPPED, *LEGACY, "--train-iters", "2", *flags.split())
    early, theirs = train(8, [*base, EARLY]), train(8, base)
    assert len(theirs[-1].losses) == 2
    assert early[-1].losses == theirs[-1].losses


def test_one_chunk_a_rank_trains_without(said_by: Callable[[ModuleType], Path]) -> None:
    """Megatron itself refuses both flags of this job, and gradients that are not computed would be absent."""
    from megatron_pp_ext.megatron.runners import choose

    said = said_by(choose)
    flags = (*PP2, *GATHER, *UNCLIPPED)
    ours = run(2, [*flags, EARLY, DEFER, "--pipeline-schedule", "zb-h1"])
    assert_same_bits(ours, stock(2, *flags))
    lines = said.read_text().splitlines()
    for flag in (EARLY, DEFER):
        assert [line for line in lines if f"zb-h1 does not support {flag}: " in line and "turned off" in line]


def _call(rank: int, schedule: str, chunks: int) -> tuple[bool, bool, own_loop.Record]:
    """Return whether the two settings are left, and a step of a model that was built with them."""
    own_loop.start()
    about: dict[str, Any] = {"ranks": 2, "microbatches": 3}
    with megatron_pp_ext.installed(schedule, **about):
        config = own_loop.config_of(chunks)
        # The config's own check demands a kernel that a CPU lacks; Megatron-Bridge sets this later, too.
        config.defer_embedding_wgrad_compute = True
        model = own_loop.build(chunks, config=config, is_distributed=True)
        settings = OptimizerConfig(
            lr=0.01, use_distributed_optimizer=True, overlap_param_gather_with_optimizer_step=True
        )
        get_megatron_optimizer(settings, model)
        record = own_loop.train(model, (3,))
        return (
            settings.overlap_param_gather_with_optimizer_step,
            config.defer_embedding_wgrad_compute,
            record,
        )


def _stock(rank: int) -> own_loop.Record:
    own_loop.start()
    return own_loop.train(own_loop.build(1, is_distributed=True), (3,))


@pytest.mark.parametrize(("schedule", "chunks"), first(1, [("zb-h1", 1), ("v-half", 2)]))
def test_a_call_turns_off_what_has_no_use(
    schedule: str, chunks: int, said_by: Callable[[ModuleType], Path]
) -> None:
    """With one chunk a rank megatron.core fails to make the optimizer of those after chunk 0."""
    said = said_by(optimizer)
    ours, theirs = run_ranks(_call, 2, schedule, chunks), run_ranks(_stock, 2)
    assert [result[:2] for result in ours] == [(chunks > 1, False)] * 2
    own_loop.assert_same([record for *_, record in ours], theirs)
    early, defer = "overlap_param_gather_with_optimizer_step", "defer_embedding_wgrad_compute"
    lines = said.read_text().splitlines()
    assert [early in line for line in lines] == [True, False][chunks - 1 :]
    assert f"megatron_pp_ext: {schedule} does not support {defer}: schedules defer" in lines[-1]
