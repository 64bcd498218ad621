"""Today's models train under this package's schedules as under stock's: losses and gradients bit for bit."""

import pytest

from tests.support.architectures import FLAGS, flags
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import wide

IN_MAKE_TEST = ("nemotron-3", "v-half")
CASES = [(model, schedule) for model in FLAGS for schedule in ("v-half", "zb-h1", "flex")]
LIMIT = {"flex": ("--pipeline-memory-limit", "0.8")}


@pytest.mark.parametrize(
    ("model", "schedule"), [case if case == IN_MAKE_TEST else wide(case) for case in CASES]
)
def test_trains_as_stock(model: str, schedule: str) -> None:
    words = flags(model, stages=2 if schedule == "zb-h1" else 4)
    words += ["--pipeline-model-parallel-size", "2", "--clip-grad", "0"]
    ours = run(2, [*words, "--pipeline-schedule", schedule, *LIMIT.get(schedule, ())])
    assert_same_bits(ours, run(2, words))


@pytest.mark.parametrize("model", [wide(model) for model in FLAGS if "nemotron" not in model])
def test_trains_in_pairs_as_stock(model: str) -> None:
    """Megatron has plans for these; hybrid models have none."""
    words = [
        *flags(model, stages=4),
        *["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
    ]
    words += ["--bf16", "--accumulate-allreduce-grads-in-fp32", "--clip-grad", "0"]
    ours = run(4, [*words, "--overlap-moe-expert-parallel-comm", "--pipeline-schedule", "dualpipe-v"])
    assert_same_bits(ours, stock(4, *words, "--num-layers-per-virtual-pipeline-stage", "2"))
