"""pipedream and pipedream-2bw on Megatron, against one process that keeps every version of the weights."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.integration.runners import flush_free, free_memory
from megatron_pp_ext.job import updates
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.families.pipedream import Weights
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.view import trace_file
from tests.support import frozen, rounding, training
from tests.support.ranks import RankError, run_ranks
from tests.support.samples import samples_of
from tests.support.tiers import first
from tests.support.without_flush import ADAM, MODEL, SGD, UPDATES, flags_of, noted, reference, run

TIGHT = ("--train-iters", "2", *flags_of("1-1-1-1", 1, "latest"))

CASES = [
    ("1-1-1-1", 1, "latest"),
    ("1-1-1-1", 4, "previous"),
    ("1-1-1", 1, "same"),
    ("1-1", 1, "latest"),
    ("1-1-1", 1, "latest"),
    ("1-1-1-1", 2, "latest"),
]


@pytest.mark.parametrize(("replicas", "interval", "rule"), first(1, CASES))
def test_parameters_after_ten_updates_with_sgd(replicas: str, interval: int, rule: str) -> None:
    stages = len(replicas.split("-"))
    expected = reference(replicas, interval, rule, SGD)
    ranks = run(stages, (*MODEL, *SGD, *flags_of(replicas, interval, rule)))
    assert ranks[-1]["losses"] == expected["losses"]
    trained = {name: value for rank in ranks for name, value in rank["parameters"].items()}
    assert trained.keys() == expected["parameters"].keys()
    for name, value in trained.items():
        assert torch.equal(value, expected["parameters"][name]), name
    # Beside the newest: n - s - 1 for PipeDream, as many as on the first stage in step, one for 2BW.
    behind = {
        "latest": range(stages - 1, -1, -1),
        "same": [stages - 1] * stages,
        "previous": [interval] * stages,
    }
    assert [rank["versions"] for rank in ranks] == [math.ceil(n / interval) for n in behind[rule]]


@pytest.mark.parametrize(
    ("replicas", "interval", "rule"),
    first(0, [("1-1-1", 3, "previous"), ("1-1", 1, "latest"), ("1-1-1-1", 1, "latest")]),
)
def test_parameters_after_ten_updates_with_adam(replicas: str, interval: int, rule: str) -> None:
    expected = reference(replicas, interval, rule, ADAM)
    for rank in run(len(replicas.split("-")), (*MODEL, *ADAM, *flags_of(replicas, interval, rule))):
        for name, value in rank["parameters"].items():
            assert torch.equal(value, expected["parameters"][name]), name


@pytest.mark.parametrize("kind", first(0, ["layers", "adapters"]))
def test_parameters_beside_frozen_ones(kind: str) -> None:
    """A stage that trains nothing among them; frozen weights have no versions and stay as they are."""
    flags = (*SGD, frozen.FLAG, kind)
    expected = reference("1-1-1", 1, "latest", flags)
    ranks = run(3, (*MODEL, *flags, *flags_of("1-1-1", 1, "latest")))
    assert ranks[-1]["losses"] == expected["losses"]
    for rank in ranks:
        for name, value in rank["parameters"].items():
            assert torch.equal(value, expected["parameters"][name]), name
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


def test_evaluation_leaves_alone_what_is_in_flight() -> None:
    evaluation = ("--eval-interval", "3", "--eval-iters", "2")
    ranks = run(4, (*MODEL, *SGD, *evaluation, *flags_of("1-1-1-1", 1, "latest")))
    assert ranks[-1]["losses"] == reference("1-1-1-1", 1, "latest", SGD)["losses"]


def test_clipping_goes_by_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The two stages' norms make up the whole model's; neither has waited for the other's, which is said."""
    said = tmp_path / "said"

    def print_rank_0(text: str) -> None:
        with said.open("a") as log:
            log.write(f"{text}\n")

    monkeypatch.setattr(flush_free, "print_rank_0", print_rank_0)
    flags = (*MODEL, *SGD, "--clip-grad", "0.1", "--train-iters", "2")
    first, last = (rank["norms"][0] for rank in run(2, (*flags, *flags_of("1-1", 1, "latest"))))
    assert said.read_text().count("--clip-grad 0.1 goes by each pipeline stage's own gradient norm") == 2
    whole = run(2, (*flags, *flags_of("1-1", 1, "latest"), "--pipeline-allow-waits"))
    assert said.read_text().count("goes by each") == 2
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
        straight = updates.Updates(1, Weights.LATEST, False, Replicas.straight(4))
        flush_free.require_room(straight, 0, 100)

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
    running._updates = updates.Updates(4, Weights.PREVIOUS, False, Replicas.straight(4))
    with pytest.raises(RuntimeError, match="2 microbatches while updates every 4 are under way"):
        running.update(SimpleNamespace(microbatches=2), None)


@pytest.mark.wide
def test_a_killed_and_resumed_run_uses_every_sample_once(tmp_path) -> None:
    """The samples of every step are those that stock takes for it, whatever was in flight at the end."""
    steps = (*MODEL, *ADAM, "--train-iters", "8", "--pipeline-model-parallel-size", "3")
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *steps, "--global-batch-size", "2"])
    ours = [*argv, *flags_of("1-1-1", 2, "latest")]
    saves = ("--save", str(tmp_path / "ckpt"), "--save-interval", "3", "--ckpt-format", "torch_dist")
    run_ranks(noted, 3, argv, str(tmp_path / "stock"), None)
    with pytest.raises(RankError, match="killed"):
        run_ranks(noted, 3, [*ours, *saves], str(tmp_path / "killed"), 5)
    run_ranks(noted, 3, [*ours, "--load", str(tmp_path / "ckpt")], str(tmp_path / "resumed"), None)

    stock, killed, resumed = (samples_of(tmp_path / f"{name}.2") for name in ("stock", "killed", "resumed"))
    assert min(resumed) == 3  # the checkpoint's
    assert {step: killed[step] for step in range(3)} | resumed == stock
    assert [len(samples) for samples in stock.values()] == [2] * 8


def test_ten_updates_are_one_1f1b(tmp_path) -> None:
    """The recorded order is 1F1B over all microbatches: the pipeline does not drain between two updates."""
    file = tmp_path / "trace.json"
    flags = (*MODEL, *SGD, "--train-iters", "10", "--pipeline-trace", str(file))
    run(4, (*flags, *flags_of("1-1-1-1", 2, "latest")))
    step = trace_file.read(file)
    assert step.timeline().schedule.orders == one_f_one_b.build(4, 20).orders
    assert [record.peak_microbatches for record in step.records] == [4, 3, 2, 1]
