"""What is rounding and what is a finding, where a job is further from stock than the documents allow."""

import shlex
from pathlib import Path

import pytest
import torch

from tests.hunt.fuzz.factors import FACTORS, levels
from tests.hunt.fuzz.noise import LastBits, Noise, between
from tests.hunt.fuzz.trial import Kind, Trials
from tests.support.comparison import Result, run

CLIPPED = {"precision": "bf16", "clipping": "engages"}
"""Later losses of such a job may be a thousandth from stock's, and the first step's not at all."""


def result(last: float = 4.0, first: float = 4.0, norm: float = 1.0) -> Result:
    gradients = {("weight", 0): torch.tensor([first])}
    return Result([first, 4.0, last], gradients, [], [norm, 1.0, 1.0], [], 0.1)


@pytest.mark.parametrize(
    ("choices", "half", "single", "noise", "kind"),
    [
        (CLIPPED, result(4.003), result(), result(), Kind.EQUAL),
        (CLIPPED, result(4.04), result(), result(4.02), Kind.NOISE),
        (CLIPPED, result(4.04), result(), result(4.004), Kind.DIFFERENT),
        (CLIPPED, result(4.04), result(4.001), result(4.02), Kind.DIFFERENT),
        (CLIPPED, result(4.0, first=4.001), result(), result(4.02, first=4.1), Kind.DIFFERENT),
        (CLIPPED, result(norm=1.001), result(), result(norm=1.1), Kind.DIFFERENT),
        ({"precision": "bf16", "clipping": "off"}, result(4.001), result(), result(4.1), Kind.DIFFERENT),
        ({"clipping": "engages"}, None, result(4.001), result(4.01), Kind.NOISE),
        ({"clipping": "engages"}, None, result(4.001), result(), Kind.DIFFERENT),
    ],
    ids=[
        "within the table",
        "as noise",
        "more than noise",
        "in fp32 too",
        "in the first step",
        "in the first norm",
        "where bits are promised",
        "noise of fp32",
        "more than noise of fp32",
    ],
)
def test_what_noise_excuses(
    choices: dict[str, str], half: Result | None, single: Result, noise: Result, kind: Kind, tmp_path: Path
) -> None:
    """``half`` and ``single`` are our runs in bf16 and fp32; ``noise`` is stock's, in fp32 if that is all."""

    def train(ranks: int, flags: list[str], disturb: LastBits | None = None) -> Result:
        if disturb:
            assert disturb.precision == ("bf16" if "--bf16" in flags else "fp32")
            return noise if disturb.precision == "bf16" or not half else result()
        if "--pipeline-schedule" not in flags:
            return result()
        return half if half and "--bf16" in flags else single

    plain = {"seed": "1", "schedule": "v-half", "measures": "none", "resume": "none"}
    row = {**plain, **{factor: levels(factor)[0] for factor in FACTORS}, **choices}
    outcome = Trials(tmp_path, train)(row)
    assert outcome.kind is kind
    if single.losses[-1] != 4.0 and half:
        assert any(line.startswith("in fp32 too, step 3: lm loss") for line in outcome.lines)


def test_noise_moves_later_steps_alone() -> None:
    """By about as much as its size, the same on all replicas; another draw moves them otherwise."""
    flags = shlex.split(
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --num-layers 2 --train-iters 2 "
        "--global-batch-size 2 --optimizer sgd --lr 0.1"
    )
    stock = run(4, flags)
    noisy = [run(4, flags, disturb=LastBits("bf16", draw)) for draw in (0, 1)]
    for disturbed in noisy:
        assert disturbed.losses[0] == stock.losses[0]
        assert 0 < abs(disturbed.losses[1] - stock.losses[1]) < 0.01
    assert noisy[0].losses != noisy[1].losses
    assert between(stock, noisy).losses == pytest.approx(
        max(abs(one.losses[1] / stock.losses[1] - 1) for one in noisy), rel=0.01
    )


def test_noise_is_the_largest_of_all_steps_and_runs() -> None:
    stock = result()._replace(logged=[{"lm loss": "4.0", "other loss": "2.0"}], validation=[4.0])
    one = stock._replace(losses=[4.0, 4.04, 4.0], norms=[1.0, 1.0, None])
    other = stock._replace(
        validation=[5.0], norms=[1.0, 2.0, 1.0], logged=[{"lm loss": "4.0", "other loss": "1.0"}]
    )
    assert between(stock, [one, other]) == pytest.approx(Noise(losses=0.2, norms=0.5, logged=0.5))
