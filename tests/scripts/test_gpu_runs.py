"""benchmarks/gpu: losses that differ fail the run. No GPU is used: the training runs are made up."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import bench, check, layers, runs

LOSSES = [7 - 0.1 * step for step in range(runs.PARITY_STEPS)]

Change = Callable[[list[float]], list[float]]


class Bench(bench.Bench):
    """Every run logs ``LOSSES``, and that of V-Half other losses."""

    def __init__(self, out: Path, change: Change) -> None:
        super().__init__(out, dry=False, backend="nccl")
        self.change = change

    def pretrain(self, name: str, ranks: int, flags: list[str], seconds: float = 150) -> str:
        losses = self.change(LOSSES) if name == "parity-v-half" else LOSSES
        return "\n".join(f"iteration {step}/20 | lm loss: {loss:.6E} |" for step, loss in enumerate(losses))


def later_by(difference: float) -> Change:
    """Losses further and further from what they should be."""
    return lambda losses: [
        loss * (1 + difference * step / (len(losses) - 1)) for step, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("change", [lambda losses: losses, later_by(0.9 * runs.FURTHEST)])
def test_equal_losses_and_those_that_rounding_explains_pass(tmp_path: Path, change: Change) -> None:
    assert "v-half" in runs.parity(Bench(tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [
        later_by(1.1 * runs.FURTHEST),
        later_by(-1.1 * runs.FURTHEST),
        lambda losses: [losses[0] + 2e-6 * losses[0], *losses[1:]],
        lambda losses: [*losses[:-1], float("nan")],
    ],
    ids=["above", "below", "the first", "nan"],
)
def test_other_losses_fail(tmp_path: Path, change: Change) -> None:
    with pytest.raises(RuntimeError, match=r"^v-half trained otherwise than the baseline") as error:
        runs.parity(Bench(tmp_path, change))
    assert "| v-zb | 7 | 5.1 | equal |" in str(error.value)


def test_too_few_losses_fail(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="v-half logged 19 losses of 20"):
        runs.parity(Bench(tmp_path, lambda losses: losses[:-1]))


def test_a_part_that_fails_decides_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The parts behind it run all the same."""

    def fail(bench: bench.Bench) -> str:
        raise RuntimeError("losses differ")

    monkeypatch.setattr(runs, "parity", fail)
    monkeypatch.setattr(layers, "split", lambda bench: "## split is done")
    with pytest.raises(SystemExit) as end:
        check.main(tmp_path, parts="parity,split", dry=True)
    assert end.value.code == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "failed: losses differ" in page
    assert "## split is done" in page
    check.main(tmp_path, parts="split", dry=True)
