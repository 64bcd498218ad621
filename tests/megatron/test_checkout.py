"""A checkout's own unmodified pretrain_gpt.py, through the launcher."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import rounding
from tests.support.training import TINY

CHECKOUT = os.environ.get("MEGATRON_LM", "")


def printed_losses(flags: list[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "megatron_pp_ext", "--cpu", f"{CHECKOUT}/pretrain_gpt.py", *TINY, "--mock-data"]
    command += ["--pipeline-model-parallel-size", "4", "--eval-interval", "2", "--eval-iters", "1", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return re.findall(r"lm loss[^:]*: (\S+)", run.stdout)


@pytest.mark.checkout
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM does not name a Megatron-LM checkout")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_unmodified_script_trains_and_evaluates_as_stock(name):
    assert printed_losses(["--pipeline-schedule", name]) == printed_losses([])


@pytest.mark.checkout
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM does not name a Megatron-LM checkout")
def test_unmodified_script_goes_on_under_a_v(tmp_path):
    """Initial weights go by rank, so a V and a line compare from a checkpoint on.

    Gradients are clipped here, and the norm is summed in another order. Megatron prints seven digits.
    """
    checkpoint = ["--ckpt-format", "torch_dist", "--train-iters", "4"]
    save = ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"]
    printed_losses([*checkpoint, *save])
    resume = [*checkpoint, "--load", str(tmp_path)]
    ours = printed_losses([*resume, "--pipeline-schedule", "v-half"])
    assert [*map(float, ours)] == pytest.approx(
        [*map(float, printed_losses(resume))], rel=rounding.relative() + rounding.PRINTED
    )
