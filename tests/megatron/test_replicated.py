"""Stages with different numbers of replicas, against one process that keeps every version of the weights."""

import math
from pathlib import Path

import pytest

from megatron_pp_ext import cpu
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.sizes import fewest_ranks
from megatron_pp_ext.megatron.requested import Settings
from megatron_pp_ext.pipedream import flush_free
from megatron_pp_ext.schedule.families.pipedream import Replicas
from tests.support import rounding, training
from tests.support.flags import assert_refused, read_by_commands
from tests.support.flags import read as read_flags
from tests.support.ranks import RankError, run_ranks
from tests.support.samples import samples_of
from tests.support.tiers import first
from tests.support.without_flush import (
    ADAM,
    MODEL,
    SGD,
    UNTIED,
    assert_same_parameters,
    flags_of,
    noted,
    reference,
    run,
)

FEW = ("--num-layers", "4", "--train-iters", "8")
EVALUATED = ("--eval-interval", "3", "--eval-iters", "2")


@pytest.mark.parametrize(
    ("replicas", "interval", "rule", "optimizer"),
    first(
        1,
        [
            ("2-1", 2, "latest", (*SGD, *EVALUATED)),
            ("3-1", 3, "same", SGD),
            ("1-2", 2, "latest", ADAM),
            ("2-1", 4, "previous", SGD),
        ],
    ),
)
def test_parameters_after_eight_updates(replicas: str, interval: int, rule: str, optimizer: tuple) -> None:
    counts = [*map(int, replicas.split("-"))]
    expected = reference(replicas, interval, rule, (*FEW, *optimizer))
    ranks = run(sum(counts), (*MODEL, *FEW, *optimizer, *flags_of(replicas, interval, rule)))
    # Each replica has one gradient, and two have one sum; more are added up in another order.
    is_exact = interval == max(counts) == 2
    within = 0 if is_exact else rounding.relative()
    assert ranks[-1]["losses"] == pytest.approx(expected["losses"], rel=within)
    assert ranks[-1]["validation"] == pytest.approx(expected["validation"], rel=within)
    assert bool(expected["validation"]) is (EVALUATED[0] in optimizer)
    if is_exact:
        assert_same_parameters(ranks, expected)
    for rank in ranks:
        for name, value in rank["parameters"].items():
            rounding.assert_gradients_close(value, expected["parameters"][name], name=name)


def test_tensor_parallel_replicas() -> None:
    """The norm of a stage's gradients is summed over its tensor-parallel ranks, once for all replicas."""
    flags = (*MODEL, *SGD, *FEW, "--train-iters", "3", "--tensor-model-parallel-size", "2")
    alone = run(2, (*flags, "--global-batch-size", "2"), ("2-1", 2, "latest"))[0]
    ranks = run(6, (*flags, *flags_of("2-1", 2, "latest")))
    assert ranks[-1]["losses"] == alone["losses"]
    for stages in (0, 4), (3, 5):
        norms = [math.hypot(*both) for both in zip(*(ranks[rank]["norms"] for rank in stages), strict=True)]
        assert norms == pytest.approx(alone["norms"], rel=rounding.relative())


def test_clipping_goes_by_stage() -> None:
    """No replica waits for a pipeline; those of a stage agree."""
    flags = (*MODEL, *SGD, *FEW, "--train-iters", "2", "--clip-grad", "0.1")
    first, second, last = (rank["norms"] for rank in run(3, (*flags, *flags_of("2-1", 2, "latest"))))
    assert first == second != last


def test_a_killed_run_is_resumed_by_itself_and_by_stock(tmp_path: Path) -> None:
    """Each sample is read once, and the first update behind a checkpoint is stock's own step."""
    folder = str(tmp_path / "ckpt")
    saves = ("--save", folder, "--save-interval", "3", "--ckpt-format", "torch_dist")
    loads = ("--load", folder, "--train-iters", "4", "--override-opt_param-scheduler")
    stock = cpu.with_cpu_flags(
        [*training.TINY, "--mock-data", *MODEL, *FEW, *ADAM, "--global-batch-size", "2"]
    )
    ours = [*stock, *flags_of("2-1", 2, "latest")]

    def train(name: str, ranks: int, argv: list[str], dies_at: int | None = None) -> list[dict]:
        return run_ranks(noted, ranks, argv, str(tmp_path / name), dies_at)

    train("stock", 1, stock)
    with pytest.raises(RankError, match="killed"):
        train("killed", 3, [*ours, *saves], 5)
    resumed = train("resumed", 3, [*ours, *loads])
    (by_stock,) = train("by stock", 1, [*stock, *loads])
    assert_same_parameters(resumed, by_stock)

    expected, killed, loaded = (samples_of(tmp_path / name) for name in ("stock.0", "killed.2", "resumed.2"))
    assert {step: killed[step] for step in range(3)} | loaded == {step: expected[step] for step in range(4)}
    assert samples_of(tmp_path / "by stock.0") == {3: expected[3]}
    assert [len(samples) for samples in expected.values()] == [2] * 8


def test_all_that_exchange_messages_meet_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator at the first message of two ranks, and their hosts wait for that."""
    monkeypatch.setattr(flush_free, "message_groups", lambda settings, ranks, edges: (ranks, edges))
    monkeypatch.setattr(flush_free, "ranks_of_pipeline", lambda group: [4, 5, 6, 7])
    monkeypatch.setattr(flush_free.dist, "get_rank", lambda: 6)
    place = flush_free._ReplicaPlace(Replicas((1, 2, 1)), None, Settings())
    assert place.stage == 1
    assert place.message_groups() == ([4, 5, 6, 7], [(0, 1), (0, 2), (1, 3), (2, 3)])


REPLICATED = (
    f"{UNTIED} --pipeline-model-parallel-size 2 --global-batch-size 3 --pipeline-schedule pipedream "
    "--pipeline-replicas 3-1"
)


def test_batches_of_an_evaluation_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if not training.has_flag("--eval-global-batch-size"):
        pytest.skip("this Megatron has no --eval-global-batch-size")
    assert_refused(
        monkeypatch, f"{REPLICATED} --eval-global-batch-size 4", "--eval-global-batch-size: 4 micro"
    )
    read_flags(monkeypatch, f"{REPLICATED} --eval-global-batch-size 6")


def test_what_the_flags_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the planner, too."""
    pipeline = read_flags(monkeypatch, REPLICATED)
    assert pipeline.updates.replicas.counts == (3, 1)
    assert (pipeline.updates.interval, pipeline.request.data, pipeline.request.microbatches) == (3, 1, 3)
    asked = read_by_commands([*training.TINY, *REPLICATED.split()])
    assert fewest_ranks(asked) == 4
    assert for_world(asked, 4).updates == pipeline.updates
