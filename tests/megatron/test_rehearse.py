"""mpp rehearse: a rank that runs alone holds what it holds among the others, and runs the same actions."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.cli.rehearse import environment, rehearsal_flags
from megatron_pp_ext.job.sizes import smallest_world
from megatron_pp_ext.megatron.runners.rehearsing import _LastingBytes, _parameters
from megatron_pp_ext.planner import described
from megatron_pp_ext.schedule.formats import csv_file, rehearsal_file, trace_file
from megatron_pp_ext.schedule.formats.rehearsal_file import Collective, RankRehearsal
from tests.support import ranks, training
from tests.support.comparison import traced
from tests.support.tiers import first
from tests.support.wrapped import KINDS, Wrapped, bytes_of, wrapped

SEQUENCE = HIDDEN = 32


def rehearse(flags: str, folder: Path) -> dict[int, RankRehearsal]:
    """Every rank of a pipeline as the command would run it, each in a process that knows of no other."""
    words = [*training.TINY, *flags.split()]
    size = int(words[words.index("--pipeline-model-parallel-size") + 1])
    files = [folder / f"{rank}.json" for rank in range(size)]
    asked = described.read(words, None).job

    def alone(rank: int) -> None:
        os.environ.update(environment(asked, rank, smallest_world(asked)))
        argv = rehearsal_flags(words, 2, files[rank])
        training._train(rank, cpu.with_cpu_flags(argv), training.initialize_by_layer, None)

    ranks.run_ranks(alone, size)
    return {rank: rehearsal_file.read(file) for rank, file in enumerate(files)}


def weight_bytes(chunks: list[torch.nn.Module]) -> int:
    return sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())


def test_weights_of_experts_are_counted_apart() -> None:
    """Megatron marks those of which each expert-parallel rank has its own."""
    chunk = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 5, bias=False))
    chunk[1].weight.allreduce = False
    assert _parameters(chunk) == {"parameters": 12, "expert_parameters": 20}


@pytest.mark.parametrize(
    "flags",
    first(
        1,
        [
            "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--pipeline-schedule v-half --pipeline-vocabulary shared --untie-embeddings-and-output-weights",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "--pipeline-model-parallel-size 3 --num-layers 6 --pipeline-schedule v-half "
            "--pipeline-loss-rank last --pipeline-vocabulary shared",
        ],
    ),
)
def test_peaks_and_orders_are_those_of_the_real_run(flags: str, tmp_path: Path) -> None:
    found = rehearse(flags, tmp_path)
    file = tmp_path / "trace.json"
    world = smallest_world(described.read(flags.split(), None).job)
    real_flags = [*flags.split(), "--train-iters", "2", "--pipeline-trace", str(file)]
    runs = training.train(world, real_flags, grab=weight_bytes)
    real = trace_file.read(file)
    if "--sequence-parallel" in flags:
        # Of a stage of two layers: two gathers and two scatters a layer, forward and back, of fp32.
        gather = Collective(0, "F", "gather", 4 * SEQUENCE * HIDDEN, ranks=2, stride=1)
        collectives = found[1].collectives
        assert collectives.count(gather) == collectives.count(gather._replace(kind="I")) == 8
        assert found[1].message_bytes == gather.size // 2
        # An S gathers the hidden states of all tokens.
        assert collectives.count(gather._replace(kind="S")) == ("--pipeline-vocabulary" in flags)
    schedule = csv_file.read(tmp_path / "0.csv")
    assert schedule.orders == real.timeline().schedule.orders
    for rank, record in enumerate(real.records):
        # A row a timed step, around 1 for an action that took what is typical of its kind.
        assert {len(row) for row in found[rank].ratios} == {len(schedule.orders[rank])}
        assert all(ratio > 0 for row in found[rank].ratios for ratio in row)
        assert len(found[rank].step_seconds) == len(found[rank].ratios)
        assert found[rank].peak_activation_bytes == record.peak_bytes
        assert found[rank].weight_bytes == runs[rank * world // len(found)].grabbed
        # In fp32 a gradient is as large as its weight, and Adam keeps two numbers and a counter of each.
        assert found[rank].gradient_bytes == found[rank].weight_bytes
        assert found[rank].optimizer_bytes == pytest.approx(2 * found[rank].weight_bytes, rel=0.01)


def test_a_pair_is_rehearsed_action_by_action(tmp_path: Path) -> None:
    """In the order of the real run, and with the exchanges that a pair hides.

    A pair gives back what its backward kept while its forward goes on, so that the real peak is no higher.
    """
    flags = (
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v --overlap-moe-expert-parallel-comm "
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 4 --disable-bias-linear --bf16 "
        "--moe-token-dispatcher-type alltoall"
    )
    # Every expert gets every token: bytes must not depend on what a router prefers on this processor.
    found, real = rehearse(flags, tmp_path), traced(4, flags.split())
    schedule = csv_file.read(tmp_path / "0.csv")
    assert schedule.paired
    assert (schedule.orders, schedule.paired) == (real.timeline().schedule.orders, real.paired)
    for rank, record in enumerate(real.records):
        assert {len(row) for row in found[rank].ratios} == {len(schedule.orders[rank])}
        assert found[rank].peak_activation_bytes >= record.peak_bytes
        exchanged = Counter(
            (one.chunk, one.kind) for one in found[rank].collectives if one.operation == "all_to_all"
        )
        # Two layers a chunk: tokens and their probabilities leave, and tokens come back.
        assert set(exchanged.values()) == {2 * 3}
        assert {kind for _, kind in exchanged} >= {"F"}


def test_bytes_that_outlive_a_step() -> None:
    """Weights, gradients (experts' have buffers of their own) and Adam's state; memory counts once."""
    dense, expert = (torch.nn.Parameter(torch.ones(rows, 4)) for rows in (4, 8))
    tied = torch.nn.Parameter(dense.data[:])
    buffers = [SimpleNamespace(grad_data=torch.zeros(parameter.numel())) for parameter in (dense, expert)]
    chunk = SimpleNamespace(
        parameters=lambda: [dense, expert, tied], buffers=buffers[:1], expert_parallel_buffers=buffers[1:]
    )
    optimizer = torch.optim.Adam([dense, expert])
    for parameter in (dense, expert):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = _LastingBytes([chunk], [optimizer])
    numbers = 4 * (4 + 8)
    assert (held.weights, held.gradients) == (4 * numbers, 4 * numbers)
    # Two moments, and a counter of steps for each parameter; the weights themselves are counted already.
    assert held.optimizer == 2 * 4 * numbers + 2 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_quantized_weights(kind: type[Wrapped]) -> None:
    """The bytes of their copies count once, though an optimizer holds the copies as well."""
    weight, other = (torch.nn.Parameter(wrapped(kind, 4, 8)) for _ in range(2))
    weight.transpose_once()
    held = _LastingBytes([SimpleNamespace(parameters=lambda: [weight, other])], [torch.optim.SGD([weight])])
    assert held.weights == bytes_of(weight) + bytes_of(other) >= 3 * 4 * 8
    assert held.optimizer == 0
