"""benchmarks/gpu: losses that differ fail their row. No GPU is used: the training runs are made up."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import bench, features, parts, runs
from benchmarks.gpu.rows import FAILED, Rows

LOSSES = [7 - 0.1 * step for step in range(runs.PARITY_STEPS)]

Change = Callable[[list[float]], list[float]]


class Bench(bench.Bench):
    """Every run of 1F1B logs ``LOSSES``, V-Half's other losses, and what is ``broken`` fails."""

    def __init__(self, logs: Path, change: Change = list, broken: Sequence[str] = ()) -> None:
        super().__init__(logs, dry=False, backend="nccl")
        self.change, self.broken = change, broken
        self.ran: list[str] = []

    def pretrain(self, name: str, ranks: int, flags: Sequence[str]) -> str:
        self._begin(name)
        losses = self.change(LOSSES) if name == "parity-v-half" else LOSSES
        return "\n".join(f"iteration {step}/20 | lm loss: {loss:.6E} |" for step, loss in enumerate(losses))

    def run(self, name: str, words: Sequence[str], environment: object = None) -> str:
        """A rehearsal, which V-Half's noise disturbed, or an estimate."""
        self._begin(name)
        disturbed = "rank 2 waited for a processor" if name == "rehearse-v-half" else None
        rehearsed = {"step_seconds": 2.0, "device_bytes": {"0": 2**30}, "disturbed": disturbed}
        estimated = {"step_seconds": 1.0, "utilisation": 0.5, "ranks": [{"weights": 2**30}]}
        found = rehearsed if name.startswith("rehearse") else estimated
        (self.logs / f"{name}.json").write_text(json.dumps(found))
        return "{}"

    def _begin(self, name: str) -> None:
        self.ran.append(name)
        if name in self.broken:
            raise RuntimeError(f"status 1: it is broken, see {self.logs}/{name}.log")


def parity(bench: Bench, only: Sequence[str] = ()) -> dict:
    rows = Rows(bench.logs / "page.md", "", "", bench, only, lambda: None)
    runs.parity(bench, rows)
    return rows.rows


def later_by(difference: float) -> Change:
    """Losses further and further from what they should be."""
    return lambda losses: [
        loss * (1 + difference * step / (len(losses) - 1)) for step, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("change", [list, later_by(0.9 * runs.FURTHEST)])
def test_equal_losses_and_those_that_rounding_explains_pass(tmp_path: Path, change: Change) -> None:
    rows = parity(Bench(tmp_path, change))
    assert [*rows] == ["checkpoint", "1f1b", "v-half", "zb-h1", "v-min", "v-zb"]
    assert not any(FAILED in row for row in rows.values())


OTHERWISE = "it trained otherwise than the baseline"


@pytest.mark.parametrize(
    ("change", "broken", "row", "why"),
    [
        (later_by(1.1 * runs.FURTHEST), [], "v-half", OTHERWISE),
        (later_by(-1.1 * runs.FURTHEST), [], "v-half", OTHERWISE),
        (lambda losses: [losses[0] + 2e-6 * losses[0], *losses[1:]], [], "v-half", OTHERWISE),
        (lambda losses: [*losses[:-1], float("nan")], [], "v-half", OTHERWISE),
        (lambda losses: losses[:-1], [], "v-half", "it logged 19 losses of 20"),
        (list, ["parity-zb-h1"], "zb-h1", "status 1: it is broken, see "),
    ],
    ids=["above", "below", "the first", "nan", "too few", "broken"],
)
def test_a_run_with_other_losses_or_none_fails_its_row_alone(change, broken, row, why, tmp_path):
    rows = parity(Bench(tmp_path, change, broken))
    assert [name for name, one in rows.items() if FAILED in one] == [row]
    assert str(rows[row][FAILED]).startswith(why)
    assert "| v-zb | 7 | 5.1 | equal |" in (tmp_path / "page.md").read_text()


def test_without_a_baseline_losses_are_shown_and_not_compared(tmp_path: Path) -> None:
    rows = parity(Bench(tmp_path, broken=["parity-1f1b"]))
    assert rows["v-zb"]["first loss"] == 7
    assert rows["v-zb"][FAILED] == "there is no baseline to compare with"


def test_without_a_checkpoint_nothing_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path, broken=["parity-checkpoint"])
    assert [*parity(bench)] == ["checkpoint"]
    assert bench.ran == ["parity-checkpoint"]


def test_a_chosen_schedule_brings_its_baseline(tmp_path: Path) -> None:
    assert [*parity(Bench(tmp_path), only=["v-zb"])] == ["checkpoint", "1f1b", "v-zb"]


def test_a_noisy_rehearsal_keeps_its_row_and_a_broken_one_loses_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, broken=["rehearse-v-min"])
    rows = Rows(tmp_path / "page.md", "", "", bench, (), lambda: None)
    runs.rehearse(bench, rows)
    assert [*rows.rows] == [*runs.SCHEDULES]
    assert [name for name, row in rows.rows.items() if FAILED in row] == ["v-min"]
    assert rows.rows["v-half"]["disturbed"] == "rank 2 waited for a processor"
    assert rows.rows["v-half"]["MFU"] == "25.0%"
    assert rows.rows["v-zb"]["of 1F1B's speed"] == "1.000"


def train(part: str, bench: Bench) -> dict:
    rows = Rows(bench.logs / "page.md", "", "", bench, (), lambda: None)
    features.FEATURES[part].train(part, bench, rows)
    return rows.rows


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0.54 GB of this rank's activations went to the host in the first step, 90% of", None),
        ("0 GB of this rank's activations went to the host in the first step, only 0%", "its log has no "),
        ("", "its log has no "),
    ],
)
def test_training_with_activations_on_the_host_has_to_log_what_left(line, problem, tmp_path, monkeypatch):
    pretrain = Bench.pretrain
    monkeypatch.setattr(Bench, "pretrain", lambda *run: f"{line}\n{pretrain(*run)}")
    rows = train("offload", Bench(tmp_path))
    for name in features.FEATURES["offload"].rows:
        assert rows[name].get("logged") == (None if problem else "0.54 GB")
        assert (problem is None) is (FAILED not in rows[name])
        assert str(rows[name].get(FAILED, "")).startswith(problem or "")
    assert FAILED not in rows["1f1b"], "nothing leaves there"


def test_what_is_not_installed_does_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    bench = Bench(tmp_path)
    assert train("fp8", bench) == {"all": {"found": "transformer_engine is not installed"}}
    assert [*train("ep", bench)] == ["checkpoint", "1f1b", "v-half", "zb-h1"]
    assert {name.split("-")[0] for name in bench.ran} == {"ep"}


def test_one_queue_is_set_for_the_rows_of_its_part_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    found = []
    bench.module = lambda name, *words: found.append((words[-1], dict(bench.environment))) or {}
    for part in ("away", "away-one-queue"):
        parts.PARTS[part].run(bench, Rows(tmp_path / "page.md", "", "", bench, (), lambda: None))
    queues = [environment.get("CUDA_DEVICE_MAX_CONNECTIONS") for _, environment in found]
    assert queues == [None] * len(parts.PROFILED) + ["1"] * len(parts.PROFILED)
    assert [name for name, _ in found] == [*parts.PROFILED] * 2
