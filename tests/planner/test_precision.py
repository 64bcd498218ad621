"""The formats of numbers in an estimate: what kernels take, and what devices have."""

import shlex
from dataclasses import replace

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MODEL = (
    "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --micro-batch-size 1 "
    "--max-position-embeddings 8192 --vocab-size 32000 --attention-dropout 0 --global-batch-size 1"
)
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
BLACKWELL = ("b200", "b300", "gb200", "gb300")


def estimated(flags: str, machine: str = "h100") -> Estimate:
    """Return the estimate of ``MODEL`` with more ``flags`` on one ``machine``."""
    asked = described.read(shlex.split(f"{MODEL} {flags}"), None).counted()
    return estimate_request(asked, system.read(machine), for_world(asked, 1))


def test_no_fused_kernel_takes_fp32() -> None:
    assert estimated("") == estimated("--attention-backend unfused")
    scores = 4 * 32 * 8192**2 * 4  # of all layers, in bytes
    fused, unfused = (estimated(f"--bf16 {flags}") for flags in ("", "--attention-backend unfused"))
    assert unfused.fullest.activations - fused.fullest.activations == pytest.approx(scores / 2, rel=0.2)
    assert estimated("").fullest.activations > scores
    assert estimated("").utilisation < 1


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--fp8-format hybrid", "--fp8-format with weights in fp32 is not modelled; add --bf16"),
        ("--bf16 --fp8-format e4m3 --transformer-impl local", "no effect on --transformer-impl local"),
        ("--attention-backend flash", "--attention-backend flash has no kernel for fp32; add --bf16"),
    ],
)
def test_what_does_not_go_with_the_precision_is_refused(flags: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        estimated(flags)


@pytest.mark.parametrize("machine", system.shipped())
def test_a_recipe_runs_where_transformer_engine_has_it(machine: str) -> None:
    known = system.read(machine).fp8_recipes
    for recipe in RECIPES:
        flags = f"--bf16 --fp8-format hybrid --fp8-recipe {recipe}"
        if recipe in known:
            assert estimated(flags, machine).step_seconds < estimated("--bf16", machine).step_seconds
            continue
        with pytest.raises(ValueError, match=f"--fp8-recipe {recipe} is not for system {machine}: ") as error:
            estimated(flags, machine)
        assert "add" not in str(error.value)
    assert ("mxfp8" in known) == (machine in BLACKWELL) and bool(known) == (machine != "a100-80g")


def test_a_utilisation_above_1_is_no_estimate() -> None:
    found = estimated("--bf16")
    h100 = system.read("h100")
    found.require_possible(h100)
    replace(found, utilisation=1.2).require_possible(replace(h100, peak_rates={}))
    with pytest.raises(
        ValueError, match=r"would be an MFU of 120\.0%, which no machine has: correct the rates"
    ):
        replace(found, utilisation=1.2).require_possible(h100)
