"""What activations may take of the host, and what of a plan is offloaded."""

import logging
from contextlib import nullcontext

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.offload import megatron
from megatron_pp_ext.features.offload.feature import Offloading
from megatron_pp_ext.features.offload.megatron import HostActivations
from megatron_pp_ext.features.offload.order import OffloadRequest
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.schedule import catalog
from tests.support.offloaded import half, with_offloaded


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
