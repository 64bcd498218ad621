"""Today's models train under this package's schedules as under stock's: losses and gradients bit for bit."""

import pytest

from tests.support.architectures import FLAGS, flags
from tests.support.comparison import assert_same_bits, run
from tests.support.tiers import wide

IN_MAKE_TEST = ("nemotron-3", "v-half")
CASES = [(model, schedule) for model in FLAGS for schedule in ("v-half", "zb-h1")]


@pytest.mark.parametrize(
    ("model", "schedule"), [case if case == IN_MAKE_TEST else wide(case) for case in CASES]
)
def test_trains_as_stock(model: str, schedule: str) -> None:
    words = flags(model, stages=2 if schedule == "zb-h1" else 4)
    words += ["--pipeline-model-parallel-size", "2", "--clip-grad", "0"]
    assert_same_bits(run(2, [*words, "--pipeline-schedule", schedule]), run(2, words))
