"""Megatron's Muon under schedules that never flush, against one process that follows the papers' formulas."""

import math

import pytest

from megatron_pp_ext.megatron import releases
from tests.support import rounding, training
from tests.support.tiers import first
from tests.support.without_flush import MODEL, assert_same_parameters, flags_of, reference, run

pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs the package emerging-optimizers")

MUON = ("--optimizer", "muon", "--lr", "0.002")
SHARED = (*MUON, "--bf16", "--use-distributed-optimizer")
if releases.megatron_release() < releases.CORE_0_18:
    SHARED = ("--optimizer", "dist_muon", *SHARED[2:-1])
"""Replicas share out whole matrices; without bf16 Megatron fails at the first loss (``get_loss_scale``)."""


@pytest.mark.parametrize(
    ("replicas", "interval", "rule"), first(1, [("2-1", 2, "latest"), ("1-1", 2, "previous")])
)
def test_parameters(replicas: str, interval: int, rule: str) -> None:
    expected = reference(replicas, interval, rule, MUON)
    flags = (*MODEL, *MUON, *flags_of(replicas, interval, rule))
    ranks = run(sum(map(int, replicas.split("-"))), flags)
    assert ranks[-1]["losses"] == expected["losses"]
    assert_same_parameters(ranks, expected)


VARIANTS = {
    "momentum": (1, 1, (*MUON, "--muon-momentum", "0.5", "--muon-nesterov")),
    "tensor": (2, 1, (*MUON, "--tensor-model-parallel-size", "2")),
    "shared": (2, 2, SHARED),
}


@pytest.mark.wide
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_with_other_settings_and_parallelism(variant: str) -> None:
    width, data, flags = VARIANTS[variant]
    for flag in flags:
        if flag.startswith("--") and not training.has_flag(flag):
            pytest.skip(f"this Megatron has no {flag}")
    alone = run(width, (*MODEL, *flags, "--global-batch-size", str(data)), ("1-1", 1, "latest"))
    ranks = run(2 * width, (*MODEL, *flags, *flags_of("1-1", 1, "latest", data)))
    assert ranks[-1]["losses"] == alone[0]["losses"]


@pytest.mark.parametrize(
    "flags", [SHARED, pytest.param(MUON, marks=pytest.mark.wide)], ids=["shared", "alone"]
)
def test_clipping_goes_by_stage(flags: tuple[str, ...]) -> None:
    """Where replicas share Muon's work, stock takes the norm over all ranks."""
    flags = (*MODEL, *flags, "--clip-grad", "0.1", "--train-iters", "2", *flags_of("1-1", 1, "latest"))
    first, last = (rank["norms"][0] for rank in run(2, flags))
    whole = run(2, (*flags, "--pipeline-allow-waits"))
    assert whole[0]["norms"] == whole[1]["norms"]
    assert math.hypot(first, last) == pytest.approx(whole[0]["norms"][0], rel=rounding.relative())


def test_schedules_with_a_flush_train_as_stock() -> None:
    flags = (*MUON, "--clip-grad", "0", "--pipeline-model-parallel-size", "2", "--num-layers", "4")
    stock = training.train(2, flags)
    ours = training.train(2, (*flags, "--pipeline-schedule", "v-half"))
    assert [run.losses for run in ours if run.losses] == [stock[-1].losses]
