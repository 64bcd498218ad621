"""mpp verify, with ranks of this process in the place of torchrun's."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from megatron_pp_ext.cli import app
from megatron_pp_ext.jobs import process
from tests.support import training
from tests.support.tiers import first

JOB = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --lr 0.01 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --clip-grad 0"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 2 "
    "--use-distributed-optimizer"
)


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command; ``break_schedule(chunks)`` changes the schedule's run alone."""

    def run_verify(*words: str, break_schedule: Callable | None = None) -> Result:
        def run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
            world = int(command[command.index("--nproc-per-node") + 1])
            flags = command[command.index("--cpu") + 1 :]
            log.write_text("a run\n")
            change = break_schedule if "--pipeline-schedule" in flags else None
            training.train(world, flags, initialize=change or training.initialize_by_layer)
            return 0

        monkeypatch.setattr(process, "run", run)
        return CliRunner().invoke(app, ["verify", "--cpu", "--folder", str(tmp_path), *words])

    return run_verify


def test_a_schedule_that_trains_as_stock_does(verify: Callable[..., Result]) -> None:
    result = verify("--steps", "2", "--gradients", "--", *JOB.split(), "--pipeline-schedule", "v-half")
    assert result.exit_code == 0, result.output
    assert "equal: v-half" in result.output
    assert "difference of a loss: 0 in all 2 steps" in result.output
    assert "difference of a gradient: 0 in all 52 tensors" in result.output


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "says"),
    first(
        1,
        [
            ("--pipeline-vocabulary shared", "each rank sums over its part of a shared vocabulary"),
            (
                "--mtp-num-layers 2 --mtp-use-repeated-layer --untie-embeddings-and-output-weights "
                "--position-embedding-type rope --bf16",
                "difference of a gradient: 0 in all",
            ),
        ],
    ),
)
def test_weights_in_parts_and_weights_used_again(
    verify: Callable[..., Result], flags: str, says: str
) -> None:
    """What stock has on one rank is compared with the rows of all; a split backward sums all uses first."""
    words = (*JOB.split(), *flags.split(), "--pipeline-schedule", "v-half")
    result = verify("--steps", "2", "--gradients", "--", *words)
    assert result.exit_code == 0, result.output
    assert says in " ".join(result.output.split())


def _scale_one_gradient(chunks: list[torch.nn.Module]) -> None:
    training.initialize_by_layer(chunks)
    for name, parameter in training.global_parameters(chunks):
        if name == "decoder.layers.3.mlp.router.weight":
            parameter.register_hook(lambda gradient: gradient * 1.001)


def test_a_schedule_with_one_wrong_gradient(verify: Callable[..., Result]) -> None:
    """It is found by its name in the whole model, although a distributed optimizer has cut the gradients."""
    flags = (*JOB.split(), *EXPERTS.split(), "--pipeline-schedule", "v-half")
    result = verify("--steps", "1", "--gradients", "--", *flags, break_schedule=_scale_one_gradient)
    assert result.exit_code == 1, result.output
    assert "differs: v-half" in result.output
    assert re.search(r"1 of \d+ differ, the most:\s+\S+  decoder.layers.3.mlp.router.weight", result.output)
