"""pipedream and pipedream-2bw on Megatron, against one process that keeps every version of the weights."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.job import sizes
from megatron_pp_ext.megatron.core import free_memory
from megatron_pp_ext.pipedream import flush_free
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.families.pipedream import Replicas, WeightVersion
from megatron_pp_ext.schedule.formats import trace_file
from tests.support import frozen, rounding
from tests.support.flags import PP4, read
from tests.support.ranks import RankError
from tests.support.tiers import first
from tests.support.without_flush import (
    ADAM,
    MODEL,
    SGD,
    UPDATES,
    assert_same_parameters,
    flags_of,
    reference,
    run,
)

TIGHT = ("--train-iters", "2", *flags_of("1-1-1-1", 1, "latest"))

CASES = [
    ("1-1-1-1", 1, "latest", SGD),
    ("1-1-1-1", 4, "previous", SGD),
    ("1-1-1", 1, "same", SGD),
    ("1-1-1", 3, "previous", ADAM),
    ("1-1-1-1", 2, "latest", ADAM),
]
EVALUATION = ("--eval-interval", "3", "--eval-iters", "2")


@pytest.mark.parametrize(("replicas", "interval", "rule", "optimizer"), first(1, CASES))
def test_parameters(replicas: str, interval: int, rule: str, optimizer: tuple[str, ...], tmp_path) -> None:
    """Evaluations leave alone what is in flight, and a trace shows one 1F1B over all updates."""
    stages, file = len(replicas.split("-")), tmp_path / "trace.json"
    expected = reference(replicas, interval, rule, optimizer)
    watched = (*EVALUATION, "--pipeline-trace", str(file))
    ranks = run(stages, (*MODEL, *optimizer, *watched, *flags_of(replicas, interval, rule)))
    assert ranks[-1]["losses"] == expected["losses"]
    assert_same_parameters(ranks, expected)
    # Beside the newest: n - s - 1 for PipeDream, as many as on the first stage in step, one for 2BW.
    behind = {
        "latest": range(stages - 1, -1, -1),
        "same": [stages - 1] * stages,
        "previous": [interval] * stages,
    }
    assert [rank["versions"] for rank in ranks] == [math.ceil(n / interval) for n in behind[rule]]
    if rule == "latest":
        step = trace_file.read(file)
        assert step.timeline().schedule.orders == one_f_one_b.build(4, UPDATES * interval).orders
        assert [record.peak_microbatches for record in step.records] == [4, 3, 2, 1]


@pytest.mark.parametrize("kind", first(0, ["layers", "adapters"]))
def test_parameters_beside_frozen_ones(kind: str) -> None:
    """A stage that trains nothing among them; frozen weights have no versions and stay as they are."""
    flags = (*SGD, frozen.FLAG, kind)
    expected = reference("1-1-1", 1, "latest", flags)
    ranks = run(3, (*MODEL, *flags, *flags_of("1-1-1", 1, "latest")))
    assert ranks[-1]["losses"] == expected["losses"]
    assert_same_parameters(ranks, expected)
    assert (ranks[0]["versions"] == 0) == (kind == "layers")
    assert all(rank["versions"] < 1 for rank in ranks)


SHARDED = (*ADAM, "--use-distributed-optimizer", "--overlap-grad-reduce")
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VARIANTS = {
    "data": (2, 2, SGD),
    "distributed optimizer": (2, 2, SHARDED),
    "tensor": (2, 1, (*SGD, "--tensor-model-parallel-size", "2")),
    "bf16": (1, 1, (*SGD, "--bf16")),
    "recompute": (1, 1, (*SGD, *RECOMPUTED.split())),
}


@pytest.mark.parametrize("variant", first(1, VARIANTS))
def test_losses_with_other_parallelism_and_precision(variant: str) -> None:
    width, data, flags = VARIANTS[variant]
    alone = run(width, (*MODEL, *flags, "--global-batch-size", str(data)), ("1-1", 1, "latest"))
    ranks = run(2 * width, (*MODEL, *flags, *flags_of("1-1", 1, "latest", data)))
    assert len(alone[0]["losses"]) == UPDATES
    # Adam's parts begin elsewhere in a distributed optimizer, and so do its vectors.
    within = 0 if flags[: len(SGD)] == SGD else rounding.of_losses(UPDATES, rate=0.001)
    assert ranks[-1]["losses"] == pytest.approx(alone[0]["losses"], rel=within)


def test_clipping_goes_by_stage(said_by) -> None:
    """The two stages' norms make up the whole model's; neither has waited for the other's, which is said."""
    said = said_by(flush_free)
    flags = (*MODEL, *SGD, "--clip-grad", "0.1", "--train-iters", "2")
    first, last = (rank["norms"][0] for rank in run(2, (*flags, *flags_of("1-1", 1, "latest"))))
    assert said.read_text().count("--clip-grad 0.1 goes by each pipeline stage's own gradient norm") == 1
    whole = run(2, (*flags, *flags_of("1-1", 1, "latest"), "--pipeline-allow-waits"))
    assert said.read_text().count("goes by each") == 1
    assert whole[0]["norms"] == whole[1]["norms"]
    assert first != last
    assert math.hypot(first, last) == pytest.approx(whole[0]["norms"][0], rel=rounding.relative())


@pytest.mark.wide
def test_more_versions_than_memory_allows_are_refused(monkeypatch) -> None:
    """Half of what PipeDream's three versions take on the first rank is enough for one version each."""
    weights = sum(tensor.nbytes for tensor in run(4, (*MODEL, *SGD, *TIGHT))[0]["parameters"].values())
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 2 * weights)
    message = rf"keep 3 .* of {weights:,} .* stage 0, where a rank has {2 * weights:,} .*interval to 2,"
    with pytest.raises(RankError, match=message):
        run(4, (*MODEL, *SGD, *TIGHT))
    assert run(4, (*MODEL, *SGD, "--train-iters", "2", *flags_of("1-1-1-1", 4, "previous")))


def test_room_for_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 4 keeps three older versions, each of 100 bytes; to the byte."""

    def check(free: int) -> None:
        def gather(devices: list, mine: tuple[int, int, int]) -> None:
            devices[:] = [(0, 100, free), (1, 100, 10**6), (2, 100, 10**6), (3, 100, 10**6)]

        monkeypatch.setattr(flush_free.dist, "get_world_size", lambda: 4)
        monkeypatch.setattr(flush_free.dist, "all_gather_object", gather)
        monkeypatch.setattr(free_memory, "free_bytes", lambda: free)
        straight = sizes.Updates(1, WeightVersion.LATEST, False, Replicas.straight(4))
        flush_free.require_memory(straight, 0, 100)

    check(300)
    with pytest.raises(
        ValueError, match=r"keep 3 older version\(s\) of 100 bytes .* stage 0, where a rank has 299"
    ):
        check(299)
    with pytest.raises(ValueError, match=r"set --pipeline-update-interval to 2,"):
        check(200)
    with pytest.raises(ValueError, match="choose a schedule that flushes"):
        check(99)


def test_a_buffer_that_changes_is_refused() -> None:
    model = torch.nn.BatchNorm1d(2)
    running = object.__new__(flush_free._RunningPipeline)
    running._buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    model.eval()(torch.randn(3, 2))
    running._require_constant_buffers()
    model.train()(torch.randn(3, 2))
    with pytest.raises(RuntimeError, match="the model's buffer num_batches_tracked changes in a forward"):
        running._require_constant_buffers()


def test_another_number_of_microbatches_under_way_is_refused() -> None:
    running = object.__new__(flush_free._RunningPipeline)
    running._updates = sizes.Updates(4, WeightVersion.PREVIOUS, False, Replicas.straight(4))
    with pytest.raises(RuntimeError, match="2 microbatches while updates every 4 are under way"):
        running.update(SimpleNamespace(microbatches=2), None)


UNTIED = "--untie-embeddings-and-output-weights"
ONE = f"{PP4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream"
TWO = f"{PP4} {UNTIED} --global-batch-size 4 --pipeline-schedule pipedream-2bw"


def test_what_the_flags_mean(monkeypatch):
    updates = read(monkeypatch, ONE).updates
    assert (updates.interval, updates.weights, updates.waits) == (1, WeightVersion.LATEST, False)
    assert read(monkeypatch, f"{ONE} --pipeline-vertical-sync").updates.weights is WeightVersion.SAME
    updates = read(monkeypatch, TWO).updates
    assert (updates.interval, updates.weights) == (4, WeightVersion.PREVIOUS)
    three = f"{ONE} --global-batch-size 3 --pipeline-update-interval 3"
    assert read(monkeypatch, three).updates.interval == 3
    assert read(monkeypatch, ONE.replace(UNTIED, "--pipeline-allow-waits --fp16")).updates.waits
