"""Training with activations that wait on the host: stock's losses and gradients, bit for bit."""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.offload import megatron
from megatron_pp_ext.features.offload.feature import Offloading
from megatron_pp_ext.features.offload.megatron import HostActivations
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.megatron.runners import flushed
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kept
from tests.support.comparison import assert_close, assert_same_bits, run, stock, traced
from tests.support.offloaded import everything, half, with_offloaded
from tests.support.tiers import first

PP2 = "--pipeline-model-parallel-size 2"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = "--tensor-model-parallel-size 2 --distribute-saved-activations"
EVALUATED = "--eval-interval 1 --eval-iters 2 --clip-grad 0 --rampup-batch-size 2 2 12 --train-samples 20"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --clip-grad 0"
)


class Moving(OffloadedActivations):
    """Counts what moves, without which a test would show nothing."""

    def close(self) -> None:
        super().close()
        assert self.offloaded_bytes > 0, "nothing has moved"
        assert self.stayed_bytes == self.buffers.used_bytes == 0
        self.offloaded_bytes = 0


def must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks that are forked from here move storages of any size, and fail where none moves."""
    monkeypatch.setattr(megatron, "SMALLEST", 1)
    monkeypatch.setattr(megatron, "OffloadedActivations", Moving)


def leave(leaves: Callable[[Kept], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``leaves`` say what leaves in each of their training steps, whether a plan would have it or not."""
    schedule = flushed.Requested.schedule
    monkeypatch.setattr(
        flushed.Requested, "schedule", lambda self, inputs: with_offloaded(schedule(self, inputs), leaves)
    )
    must_move(monkeypatch)


@pytest.mark.parametrize(
    ("name", "leaves", "ranks", "flags"),
    first(
        0,
        [
            ("v-half", everything, 2, LLAMA),
            ("zb-h1", half, 2, EVALUATED),
            ("dualpipe-v", half, 2, LLAMA),
            ("interleaved", everything, 2, "--recompute-granularity selective"),
            ("v-half", everything, 4, f"{DISTRIBUTED} {LAYERS}"),
            ("1f1b", half, 4, f"{EXPERTS} --bf16"),
            ("zb-h1 --pipeline-vocabulary shared", everything, 2, "--untie-embeddings-and-output-weights"),
        ],
    ),
)
def test_same_bits_as_stock(
    name: str, leaves: Callable[[Kept], bool], ranks: int, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = stock(ranks, *PP2.split(), *flags.split())
    leave(leaves, monkeypatch)
    ours = run(ranks, [*PP2.split(), *flags.split(), "--pipeline-schedule", *name.split()])
    if "shared" in name:
        assert_close(ours, theirs)
    else:
        assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


@pytest.mark.parametrize(
    ("flags", "ranks"),
    first(
        1,
        [
            ("--pipeline-schedule v-half --pipeline-offload 0.5", 4),
            ("--pipeline-schedule flex --pipeline-memory-limit 0.4 --pipeline-offload auto", 4),
        ],
    ),
)
def test_flags(flags: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    common = f"--pipeline-model-parallel-size {ranks} {LLAMA}".split()
    theirs = stock(ranks, *common)
    must_move(monkeypatch)
    assert_same_bits(
        run(ranks, [*common, *flags.split(), "--pipeline-offload-host-bytes", "1000000000"]), theirs
    )


@pytest.mark.wide
def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan computes on the stream of exchanges stays, with the inputs of its nodes."""
    flags = f"{PP2} {EXPERTS} --bf16 --accumulate-allreduce-grads-in-fp32".split()
    theirs = stock(4, *flags, "--num-layers-per-virtual-pipeline-stage", "2")
    leave(everything, monkeypatch)
    ours = run(4, [*flags, "--overlap-moe-expert-parallel-comm", "--pipeline-schedule", "dualpipe-v"])
    assert_same_bits(ours, theirs)


@pytest.mark.wide
def test_memory_is_free_while_activations_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace shows the bytes: of eight microbatches a rank has the masks, and all else of three."""
    flags = f"{PP2} {LLAMA} --global-batch-size 8 --pipeline-schedule gpipe".split()
    here = traced(2, flags)
    leave(everything, monkeypatch)
    away = traced(2, flags)
    for stays, leaves in zip(here.records, away.records, strict=True):
        assert leaves.peak_bytes == pytest.approx(3 / 8 * stays.peak_bytes, rel=0.05)


def test_more_than_the_host_has_is_refused() -> None:
    expected = (
        "--pipeline-offload-host-bytes is 1001, but this machine has 1000 bytes free for each of its ranks"
    )
    with pytest.raises(ValueError, match=expected):
        megatron.usable_bytes(1001, 1000)
    assert [megatron.usable_bytes(limit, 1000) for limit in (1000, None)] == [1000, 500]


PLAN = plan_rank(with_offloaded(catalog.build("gpipe", 2, 6), half), 1)
KEPT = (7e8, 2e8)


def test_memory_for_a_plan_is_pinned_before_its_first_step() -> None:
    """Three of six microbatches are on the host at once."""
    for limit, pinned in ((1e9, 6e8), (5e8, 5e8)):
        moved = HostActivations(limit, KEPT).before(PLAN)
        assert moved is not None and moved.buffers.pinned_bytes == pinned
    assert HostActivations(1e9).before(PLAN).buffers.pinned_bytes == 0
    assert HostActivations(1e9, KEPT).before(plan_rank(catalog.build("gpipe", 2, 6), 1)) is None


@pytest.mark.parametrize(
    ("kept", "sent", "line"),
    [
        (
            KEPT,
            54e7,
            "0.54 GB of this rank's activations went to the host in the first step, 90% of the 0.6 GB",
        ),
        ((), 54e7, "0.54 GB of this rank's activations went to the host in the first step; how many are"),
        (
            KEPT,
            53e7,
            "only 88% of the 0.6 GB planned: 0.05 GB are in storages under 1048576 bytes, and others",
        ),
    ],
)
def test_what_left_in_the_first_step_is_held_against_the_plan(kept, sent, line, caplog, capsys, monkeypatch):
    monkeypatch.setattr(megatron, "SMALLEST", 1 << 20)
    host = HostActivations(1e9, kept)
    for _ in range(2):
        moved = host.before(PLAN)
        moved.offloaded_bytes += sent
        moved.small_bytes += 5e7
        host.after(PLAN)
    warned = "".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    printed = capsys.readouterr().out
    assert (warned + printed).count(line) == 1
    assert bool(warned) is line.startswith("only")


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_limit_is_held_against_the_machine_once_its_ranks_are_counted(is_counted, monkeypatch) -> None:
    monkeypatch.setattr(megatron, "host_bytes", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if is_counted:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    request = named("1f1b", 2, 4)
    for plain in (
        request,
        request.with_option(OffloadRequest(0.5)),
        request.with_option(OffloadRequest(0.5, 1000.0)),
    ):
        Offloading().require_possible(plain)
    with pytest.raises(ValueError, match="lower it") if is_counted else nullcontext():
        Offloading().require_possible(request.with_option(OffloadRequest(0.5, 1001.0)))
