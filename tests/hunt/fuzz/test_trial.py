"""What a hunt makes of runs, which are made up here: equal, noise, refused, or a finding, shrunk and told."""

from pathlib import Path

import pytest
import torch

from tests.hunt.fuzz import judge, shrink
from tests.hunt.fuzz.draw import plain
from tests.hunt.fuzz.noise import LastBits, Noise, between
from tests.hunt.fuzz.report import Found, sections, told
from tests.hunt.fuzz.trial import Kind, Outcome, Trials
from tests.support.comparison import Result
from tests.support.ranks import RankError

CLIPPED = {"precision": "bf16", "clipping": "engages"}
"""Later losses of such a job may be a thousandth from stock's, and the first step's not at all."""


def result(last: float = 4.0, first: float = 4.0, norm: float = 1.0) -> Result:
    gradients = {("weight", 0): torch.tensor([first])}
    return Result([first, 4.0, last], gradients, [], [norm, 1.0, 1.0], [], 0.1)


@pytest.mark.parametrize(
    ("choices", "half", "single", "noise", "kind"),
    [
        (CLIPPED, result(4.003), result(), result(), Kind.EQUAL),  # within the table
        (CLIPPED, result(4.04), result(), result(4.02), Kind.NOISE),
        (CLIPPED, result(4.04), result(), result(4.004), Kind.DIFFERENT),  # more than noise
        (CLIPPED, result(4.04), result(4.001), result(4.02), Kind.DIFFERENT),  # in fp32 too
        (CLIPPED, result(first=4.001), result(), result(4.02, 4.1), Kind.DIFFERENT),  # in the first step
        (CLIPPED, result(norm=1.001), result(), result(norm=1.1), Kind.DIFFERENT),
        ({"precision": "bf16"}, result(4.001), result(), result(4.1), Kind.DIFFERENT),  # bits are promised
        ({"clipping": "engages"}, None, result(4.001), result(4.01), Kind.NOISE),  # noise of fp32
        ({"clipping": "engages"}, None, result(4.001), result(), Kind.DIFFERENT),
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

    outcome = Trials(tmp_path, train)(plain(**choices))
    assert outcome.kind is kind
    if single.losses[-1] != 4.0 and half:
        assert any(line.startswith("in fp32 too, step 3: lm loss") for line in outcome.lines)


def test_noise_is_the_largest_of_all_steps_and_runs() -> None:
    stock = result()._replace(logged=[{"lm loss": "4.0", "other loss": "2.0"}], validation=[4.0])
    one = stock._replace(losses=[4.0, 4.04, 4.0], norms=[1.0, 1.0, None])
    logged = [{"lm loss": "4.0", "other loss": "1.0"}]
    other = stock._replace(validation=[5.0], norms=[1.0, 2.0, 1.0], logged=logged)
    assert between(stock, [one, other]) == pytest.approx(Noise(losses=0.2, norms=0.5, logged=0.5))


@pytest.mark.parametrize(
    ("skipped", "other_order", "mine", "is_equal"),
    [
        (True, True, [1.0, torch.inf, 3.0], True),
        (True, True, [1.5, torch.inf, 3.0], False),
        (True, False, [1.0, torch.inf, 3.0], False),
        (True, False, [1.0, 2.0, torch.inf], True),
        (False, True, [1.0, torch.inf, 3.0], False),
        (False, True, [1.0, torch.nan, torch.inf], False),
    ],
)
def test_gradients_that_overflow(skipped: bool, other_order: bool, mine: list[float], is_equal: bool) -> None:
    """In a step that fp16 skips; where sums are taken in another order, they may overflow elsewhere."""
    norms: list[float | None] = [None if skipped else 1.0]
    stock = Result([4.0], {("weight", 0): torch.tensor([1.0, 2.0, torch.inf])}, [], norms, [], 1.0)
    ours = stock._replace(gradients={("weight", 0): torch.tensor(mine)})
    allowed = judge.arithmetic(["--fp16"], 2, other_order)
    assert (not list(judge.differences(ours, stock, allowed))) is is_equal


INFEASIBLE = "SystemExit: megatron_pp_ext: memory limit 1 is infeasible"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ranks [0, 1] did not finish in 240 seconds", Kind.HUNG),
        (f"rank 0 failed\n\n--- rank 0 ---\n{INFEASIBLE}", Kind.REFUSED),
        ("rank 0 failed\n\n--- rank 0 ---\nSystemExit: megatron_pp_ext: never heard of it", Kind.FAILED),
        ("rank 1 failed\n\n--- rank 1 ---\nKeyError: 'x'", Kind.FAILED),
    ],
)
def test_what_comes_of_a_run_that_fails(error: str, kind: Kind, tmp_path: Path) -> None:
    """A refusal that the hunt does not know is a finding, as a crash is; so is what stock cannot run."""

    def train(ranks: int, flags: list[str]) -> Result:
        if "--pipeline-schedule" in flags or "--swiglu" in flags:
            raise RankError(error)
        return result()

    trials = Trials(tmp_path, train)
    assert trials(plain()).kind is kind
    assert trials(plain(mlp="swiglu")).kind is Kind.STOCK_FAILED
    assert Kind.STOCK_FAILED.is_finding


def test_a_finding_is_shrunk_and_told(tmp_path: Path) -> None:
    """Under a schedule, a gradient is a thousandth too large with --swiglu; its loss store is the row's."""

    def train(ranks: int, flags: list[str], initialize: object = None) -> Result:
        is_ours = "--pipeline-schedule" in flags
        assert is_ours or initialize is None
        stores.append(initialize is not None)
        wrong = is_ours and "--swiglu" in flags
        return result()._replace(gradients={("weight", 0): torch.tensor([1.001 if wrong else 1.0])})

    stores: list[bool] = []

    trials = Trials(tmp_path, train)
    row = plain(mlp="swiglu", biases="no", clipping="engages", measures="trace", store="jagged")
    outcome = trials(row)
    assert stores == [False, True]
    assert outcome.kind is Kind.DIFFERENT
    assert outcome.lines[0].startswith("1 of 1 gradients, most 0.001: weight of tensor rank 0")
    least = shrink.shrunk(row, lambda plainer: trials(plainer).is_like(outcome))
    assert least == plain(mlp="swiglu")
    found = Found(5, row, outcome, least)
    story = told(3, found)
    assert "shows it: 2 ranks, --pipeline-model-parallel-size 2; schedule v-half; --swiglu\n" in story
    assert story.endswith("again: make fuzz SEED=3 CASE=5")
    page = "\n".join(sections(3, [Found(0, plain(), Outcome(Kind.EQUAL, (), 2.0)), found]))
    assert "2 cases took 2 seconds, 1.0 each" in page
    assert "| v-half | 1 | 0 | 1 |" in page
    assert "| mlp: swiglu | 0 | 0 | 1 |" in page
    assert story in page
