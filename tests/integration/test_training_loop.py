"""What Megatron's training loop does between steps: larger batches, evaluation on several or whole sets."""

from pathlib import Path

import pytest

from megatron_pp_ext.text_data import prepare
from tests.support import rounding
from tests.support.comparison import assert_same_bits, assert_same_norms, run, stock
from tests.support.training import train

PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
STOCK: tuple[str, ...] = ()
OVERFLOWS = ("--fp16", "--initial-loss-scale", str(2**24), "--hysteresis", "1")


def schedule(name: str) -> tuple[str, ...]:
    return ("--pipeline-schedule", name)


def write(folder: Path, lines: int) -> str:
    """Make a data set of about eight tokens a line; return its prefix."""
    (folder / "text").write_text("".join(f"line {number}\n" for number in range(lines)))
    prepare(folder / "text", folder / f"data-{lines}")
    return str(folder / f"data-{lines}")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_evaluation_while_fp16_skips_steps(name: str) -> None:
    flags = (*PP2, *OVERFLOWS, "--train-iters", "6", "--num-layers", "8")
    flags += ("--use-distributed-optimizer", "--overlap-grad-reduce")
    flags += ("--eval-interval", "1", "--eval-iters", "1", "--clip-grad", "0")
    ours, theirs = run(4, [*flags, *schedule(name)]), stock(4, *flags)
    assert theirs.norms[0] is None
    assert theirs.norms[-1] is not None
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation
    assert len(ours.validation) == 8
    assert_same_norms(ours.norms, theirs.norms)


def test_batches_grow_as_under_stock(tmp_path: Path) -> None:
    """Twelve steps of 2, 4 and 6 samples."""
    data = ("--data-path", write(tmp_path, 80), "--vocab-size", "257", "--split", "100,0,0")
    growing = (*PP2, *data, "--step-batch-size-schedule", "0:2 64:4 192:6", "--train-samples", "66")
    ours, theirs = (run(2, [*growing, "--clip-grad", "0", *more]) for more in (schedule("v-half"), STOCK))
    assert len(ours.losses) == 12
    assert_same_bits(ours, theirs)


def test_several_validation_sets(tmp_path: Path) -> None:
    sets = [write(tmp_path, 40), write(tmp_path, 30)]
    flags = (*PP2, "--train-data-path", sets[0], "--valid-data-path", *sets, "--vocab-size", "257")
    flags += ("--multiple-validation-sets", "--full-validation", "--eval-interval", "2", "--eval-iters", "1")
    flags += ("--global-batch-size", "2", "--clip-grad", "0")
    ours, theirs = (train(2, [*flags, *more])[-1] for more in (schedule("zb-h1"), STOCK))
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation
    assert len(ours.validation) == 4
    assert ours.validation[0] != pytest.approx(ours.validation[1], rel=rounding.of_losses(updates=2))
