"""--pipeline-delay-correction on Megatron, against one process that follows the papers' formulas."""

from dataclasses import replace

import pytest
import torch

from megatron_pp_ext.integration.core import nesterov
from megatron_pp_ext.schedule.families.pipedream import Weights
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.updates import DelayCorrection, Updates
from tests.support import rounding
from tests.support.tiers import first
from tests.support.without_flush import (
    ADAM,
    MODEL,
    SGD,
    assert_same_parameters,
    flags_of,
    loaded_by_stock,
    reference,
    run,
)

FEEDBACK, NESTEROV = "error-feedback", "nesterov"


def corrected(correction: str) -> tuple[str, ...]:
    return ("--pipeline-delay-correction", correction)


@pytest.mark.parametrize(
    ("replicas", "interval", "rule", "correction", "copies"),
    first(
        2,
        [
            # Beside the optimizer's weights: the versions in flight and the newest point ahead.
            ("1-1-1-1", 1, "latest", FEEDBACK, [4, 3, 2, 0]),
            ("1-1", 2, "previous", FEEDBACK, [2, 2]),
            ("1-1-1", 1, "latest", NESTEROV, [2, 1, 0]),
            ("2-1", 2, "latest", FEEDBACK, [2, 2, 0]),
            ("1-1-1", 1, "same", FEEDBACK, [3, 3, 3]),
        ],
    ),
)
def test_parameters_with_sgd(replicas, interval, rule, correction, copies) -> None:
    expected = reference(replicas, interval, rule, SGD, correction)
    ranks = run(len(copies), (*MODEL, *SGD, *flags_of(replicas, interval, rule), *corrected(correction)))
    assert ranks[-1]["losses"] == expected["losses"]
    assert_same_parameters(ranks, expected)
    assert [rank["versions"] for rank in ranks] == copies
    assert expected["losses"] != reference(replicas, interval, rule, SGD)["losses"]


def test_nesterovs_step_is_that_of_nadam() -> None:
    """Over more steps than the product has factors."""
    weights = torch.randn(2, 50, dtype=torch.double)
    about = {"lr": 0.01, "betas": (0.99, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    adam = torch.optim.AdamW([ours], **about)
    nesterov.take_nesterov_steps(adam, "adam")
    nadam = torch.optim.NAdam([theirs], decoupled_weight_decay=True, **about)
    for _ in range(nesterov._FACTORS + 50):
        ours.grad = torch.randn(2, 50, dtype=torch.double)
        theirs.grad = ours.grad.clone()
        adam.step()
        nadam.step()
    # torch keeps the product in float32, by whose rounding the factors of the first dozen steps are off.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=12 * about["lr"] * rounding.FLOAT32)


def test_sgd_is_as_before_between_steps() -> None:
    """Its groups go into checkpoints, from which stock would take the setting over."""
    ours = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([ours], lr=0.1, momentum=0.9)
    nesterov.take_nesterov_steps(sgd, "sgd")
    theirs = torch.nn.Parameter(torch.ones(3))
    expected = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        ours.grad, theirs.grad = ours.detach().sin(), theirs.detach().sin()
        sgd.step()
        expected.step()
        assert sgd.param_groups[0]["nesterov"] is False
    assert torch.equal(ours, theirs)


def test_room_for_the_weights_ahead() -> None:
    """Beside the versions in flight, a stage whose gradients are late keeps the newest point ahead."""
    plain = Updates(1, Weights.LATEST, waits=False, replicas=Replicas.straight(4))
    ahead = replace(plain, correction=DelayCorrection.ERROR_FEEDBACK)
    assert [plain.copies(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert [ahead.copies(stage) for stage in range(4)] == [4, 3, 2, 0]


SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce")


@pytest.mark.wide
@pytest.mark.parametrize("correction", [FEEDBACK, NESTEROV])
def test_losses_with_replicas_that_share_the_optimizer(correction: str) -> None:
    flags = (*MODEL, *ADAM, *SHARDED)
    alone = run(2, (*flags, "--global-batch-size", "2"), ("1-1", 1, "latest", correction))
    ranks = run(4, (*flags, *flags_of("1-1", 1, "latest", data=2), *corrected(correction)))
    within = rounding.of_losses(len(alone[0]["losses"]), rate=0.001)
    assert ranks[-1]["losses"] == pytest.approx(alone[0]["losses"], rel=within)


MUON = ("--optimizer", "muon", "--lr", "0.002")


@pytest.mark.parametrize(
    ("correction", "optimizer"), first(1, [(FEEDBACK, ADAM), (NESTEROV, ADAM), (FEEDBACK, MUON)])
)
def test_checkpoints_hold_the_optimizers_own_weights(
    correction: str, optimizer: tuple[str, ...], tmp_path
) -> None:
    """And not those ahead: stock loads them with the state of its own optimizer."""
    if optimizer is MUON:
        pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs it")
    few = (*optimizer, "--train-iters", "4")
    ends = ("--save", str(tmp_path), "--save-interval", "4", "--ckpt-format", "torch_dist")
    trained = run(2, (*MODEL, *few, *flags_of("1-1", 1, "latest"), *corrected(correction), *ends))
    assert_same_parameters(loaded_by_stock(tmp_path, *few), *trained)
