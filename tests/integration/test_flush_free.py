"""pipedream and pipedream-2bw on Megatron, against one process that keeps every version of the weights."""

import functools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.runners import choose, flush_free, free_memory
from megatron_pp_ext.request import updates
from megatron_pp_ext.schedule.families import one_f_one_b
from megatron_pp_ext.schedule.families.pipedream import Weights
from megatron_pp_ext.view import trace_file
from tests.support import rounding, training
from tests.support.delayed import Reference
from tests.support.ranks import RankError, run_ranks
from tests.support.samples import note_samples, samples_of

UNTIED = "--untie-embeddings-and-output-weights"
UPDATES = 20
LAYERS = 12  # which 2, 3 and 4 stages share evenly
MODEL = (UNTIED, "--num-layers", str(LAYERS), "--train-iters", str(UPDATES), "--clip-grad", "0")
SGD, ADAM = ("--optimizer", "sgd", "--lr", "0.1"), ("--lr", "0.001")


def pretrain(rank: int, argv: list[str], reference: tuple | None) -> dict:
    """Pre-train; return this rank's parameters at the end, its losses and what weight versions took."""
    chunks: list[torch.nn.Module] = []

    def initialize(model: list[torch.nn.Module]) -> None:
        training.initialize_by_layer(model)
        chunks.extend(model)

    if reference:
        Reference(*reference).take_over()
    run = training._train(rank, argv, initialize, None)
    pipeline = requested.pipeline()
    versions = choose.runner(pipeline).most_version_bytes if pipeline else 0
    parameters = training.global_parameters(chunks)
    return {
        "parameters": {name: parameter.detach().float().clone() for name, parameter in parameters},
        "losses": run.losses,
        "norms": run.grad_norms,
        "versions": versions / sum(parameter.nbytes for _, parameter in parameters),
    }


def run(world_size: int, flags: tuple[str, ...], reference: tuple | None = None) -> list[dict]:
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *flags])
    return run_ranks(pretrain, world_size, argv, reference)


def flags_of(stages: int, interval: int, rule: str, replicas: int = 1) -> tuple[str, ...]:
    names = {
        "latest": ("pipedream", "--pipeline-update-interval", str(interval)),
        "same": ("pipedream", "--pipeline-update-interval", str(interval), "--pipeline-vertical-sync"),
        "previous": ("pipedream-2bw",),
    }
    sizes = ("--pipeline-model-parallel-size", str(stages), "--global-batch-size", str(interval * replicas))
    return (*sizes, "--pipeline-schedule", *names[rule])


@functools.cache
def reference(
    stages: int, interval: int, rule: str, optimizer: tuple[str, ...], correction: str | None = None
) -> dict:
    """Parameters by name, and losses, of one process."""
    flags = (*MODEL, *optimizer, "--global-batch-size", str(interval))
    return run(1, flags, (LAYERS, stages, interval, rule, correction))[0]


TIGHT = ("--train-iters", "2", *flags_of(4, 1, "latest"))

CASES = [
    (2, 1, "latest"),
    (3, 1, "latest"),
    (4, 1, "latest"),
    (4, 2, "latest"),
    (4, 4, "previous"),
    (3, 1, "same"),
]


@pytest.mark.parametrize(("stages", "interval", "rule"), CASES)
def test_parameters_after_twenty_updates_with_sgd(stages: int, interval: int, rule: str) -> None:
    expected = reference(stages, interval, rule, SGD)
    ranks = run(stages, (*MODEL, *SGD, *flags_of(stages, interval, rule)))
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
    ("stages", "interval", "rule"), [(2, 1, "latest"), (4, 1, "latest"), (3, 3, "previous")]
)
def test_parameters_after_twenty_updates_with_adam(stages: int, interval: int, rule: str) -> None:
    expected = reference(stages, interval, rule, ADAM)
    for rank in run(stages, (*MODEL, *ADAM, *flags_of(stages, interval, rule))):
        for name, value in rank["parameters"].items():
            assert torch.equal(value, expected["parameters"][name]), name


SHARDED = (*ADAM, "--use-distributed-optimizer", "--overlap-grad-reduce")
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
VARIANTS = {
    "data": (2, 2, SGD),
    "distributed optimizer": (2, 2, SHARDED),
    "tensor": (2, 1, (*SGD, "--tensor-model-parallel-size", "2")),
    "bf16": (1, 1, (*SGD, "--bf16")),
    "recompute": (1, 1, (*SGD, *RECOMPUTED.split())),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_with_other_parallelism_and_precision(variant: str) -> None:
    width, replicas, flags = VARIANTS[variant]
    alone = run(width, (*MODEL, *flags, "--global-batch-size", str(replicas)), (LAYERS, 2, 1, "latest"))
    ranks = run(2 * width, (*MODEL, *flags, *flags_of(2, 1, "latest", replicas)))
    assert len(alone[0]["losses"]) == UPDATES
    # Adam's parts begin elsewhere in a distributed optimizer, and so do its vectors.
    within = 0 if flags[: len(SGD)] == SGD else rounding.of_losses(UPDATES, rate=0.001)
    assert ranks[-1]["losses"] == pytest.approx(alone[0]["losses"], rel=within)


def test_evaluation_leaves_alone_what_is_in_flight() -> None:
    evaluation = ("--eval-interval", "3", "--eval-iters", "2")
    ranks = run(4, (*MODEL, *SGD, *evaluation, *flags_of(4, 1, "latest")))
    assert ranks[-1]["losses"] == reference(4, 1, "latest", SGD)["losses"]


def test_clipping_goes_by_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The two stages' norms make up the whole model's; neither has waited for the other's, which is said."""
    said = tmp_path / "said"

    def print_rank_0(text: str) -> None:
        with said.open("a") as log:
            log.write(f"{text}\n")

    monkeypatch.setattr(flush_free, "print_rank_0", print_rank_0)
    flags = (*MODEL, *SGD, "--clip-grad", "0.1", "--train-iters", "2")
    first, last = (rank["norms"][0] for rank in run(2, (*flags, *flags_of(2, 1, "latest"))))
    assert said.read_text().count("--clip-grad 0.1 goes by each pipeline stage's own gradient norm") == 2
    whole = run(2, (*flags, *flags_of(2, 1, "latest"), "--pipeline-allow-waits"))
    assert said.read_text().count("goes by each") == 2
    assert whole[0]["norms"] == whole[1]["norms"]
    assert first != last
    assert math.hypot(first, last) == pytest.approx(whole[0]["norms"][0], rel=rounding.relative())


def test_more_versions_than_memory_allows_are_refused(monkeypatch) -> None:
    """Half of what PipeDream's three versions take on the first rank is enough for one version each."""
    weights = sum(tensor.nbytes for tensor in run(4, (*MODEL, *SGD, *TIGHT))[0]["parameters"].values())
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 2 * weights)
    message = (
        rf"keep 3 older version\(s\) of {weights:,} .* rank 0, which has {2 * weights:,} .*interval to 2,"
    )
    with pytest.raises(RankError, match=message):
        run(4, (*MODEL, *SGD, *TIGHT))
    assert run(4, (*MODEL, *SGD, "--train-iters", "2", *flags_of(4, 4, "previous")))


def test_room_for_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 4 keeps three older versions, each of 100 bytes; to the byte."""

    def check(free: int) -> None:
        def gather(devices: list, mine: tuple[int, int], group: object) -> None:
            devices[:] = [(100, free), (100, 10**6), (100, 10**6), (100, 10**6)]

        monkeypatch.setattr(flush_free.dist, "all_gather_object", gather)
        monkeypatch.setattr(free_memory, "free_bytes", lambda: free)
        flush_free.require_room(
            updates.Updates(1, Weights.LATEST, waits=False), 100, SimpleNamespace(size=lambda: 4)
        )

    check(300)
    with pytest.raises(ValueError, match=r"keep 3 older version\(s\) of 100 bytes .* rank 0, which has 299"):
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
    running._updates = updates.Updates(4, Weights.PREVIOUS, waits=False)
    with pytest.raises(RuntimeError, match="2 microbatches while updates every 4 are under way"):
        running.update(SimpleNamespace(microbatches=2), None)


def noted(rank: int, argv: list[str], file: str, dies_at: int | None) -> None:
    note_samples(Path(f"{file}.{rank}"))
    if dies_at is not None:
        stock = training.training.train_step

        def train_step(*args, **kwargs):
            if training.training.get_args().curr_iteration == dies_at:
                raise KeyboardInterrupt("killed")
            return stock(*args, **kwargs)

        training.training.train_step = train_step
    training._train(rank, argv, training.initialize_by_layer, None)


def test_a_killed_and_resumed_run_uses_every_sample_once(tmp_path) -> None:
    """The samples of every step are those that stock takes for it, whatever was in flight at the end."""
    steps = (*MODEL, *ADAM, "--train-iters", "8", "--pipeline-model-parallel-size", "3")
    argv = cpu.with_cpu_flags([*training.TINY, "--mock-data", *steps, "--global-batch-size", "2"])
    ours = [*argv, *flags_of(3, 2, "latest")]
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
    run(4, (*flags, *flags_of(4, 2, "latest")))
    step = trace_file.read(file)
    assert step.timeline().schedule.orders == one_f_one_b.build(4, 20).orders
    assert [record.peak_microbatches for record in step.records] == [4, 3, 2, 1]
