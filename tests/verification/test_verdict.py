"""The comparison of two recorded runs, from records written here."""

import math
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.features.vocabulary.feature import VocabularyParallelism
from megatron_pp_ext.runtime import gradients_file
from megatron_pp_ext.schedule.formats import run_record
from megatron_pp_ext.schedule.formats.run_record import RunRecord
from megatron_pp_ext.verification.verdict import BITS, NORM_TOLERANCE, Arithmetic, compare

UNTIED = "--untie-embeddings-and-output-weights"

LAST_BIT = 4.0 + 2.0**-21


def record(*losses: float, norms: tuple[float | None, ...] = (0.5, 0.5, 0.5)) -> RunRecord:
    return RunRecord(tuple({"lm loss": loss} for loss in losses), norms)


STOCK = record(4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("ours", "flags", "equal"),
    [
        (STOCK, "", True),
        (record(LAST_BIT, 4.0, 4.0), "", False),
        (record(4.0, 4.0, LAST_BIT), "", False),
        # Norms of 0.5 are clipped at 0.1, which excuses the later steps and not the first.
        (record(4.0, 4.0, LAST_BIT), "--clip-grad 0.1", True),
        (record(LAST_BIT, 4.0, 4.0), "--clip-grad 0.1", False),
        (record(4.0, 4.0, 4.0001), "--clip-grad 0.1", False),
        (record(4.0, 4.0, 4.0001), "--clip-grad 0.1 --bf16", True),
        (record(4.0, 4.0, 4.01), "--clip-grad 0.1 --bf16", False),
        (record(4.0, 4.0, 4.01), "--clip-grad 0.1 --bf16 --num-experts 8", True),
        (record(4.0, 4.0, 4.0001), "--bf16", False),
        (record(4.0, 4.0, 4.0, norms=(0.5, 0.5 * (1 + NORM_TOLERANCE / 2), 0.5)), "", True),
        (record(4.0, 4.0, 4.0, norms=(0.5, 0.5 * (1 + NORM_TOLERANCE * 2), 0.5)), "", False),
        (record(4.0, 4.0, 4.0, norms=(0.5, None, 0.5)), "", False),
        (record(4.0, 4.0, math.nan), "--clip-grad 0.1", False),
        (RunRecord(({"lm loss": 4.0}, {}, {"lm loss": 4.0}), STOCK.norms), "", False),
        (RunRecord(({"lm loss": 4.0, "mtp loss": 1.0},) * 3, STOCK.norms), "", False),
    ],
)
def test_what_counts_as_equal(ours: RunRecord, flags: str, equal: bool) -> None:
    assert compare(STOCK, ours, Arithmetic.of_flags(flags.split(), 2)).is_equal is equal


def test_norms_of_low_precision_gradients_that_are_summed_in_another_order() -> None:
    ours = record(4.0, 4.0, 4.0, norms=(0.50002, 0.5, 0.5))
    for arithmetic, equal in (
        (Arithmetic("bf16", replicas=2), False),
        (Arithmetic("bf16", replicas=4), True),
        (Arithmetic("fp32", replicas=4), False),
        (Arithmetic("fp16", sums=VocabularyParallelism.sums[0]), True),
        (Arithmetic("fp32", sums=VocabularyParallelism.sums[0]), False),
    ):
        assert compare(STOCK, ours, arithmetic).is_equal is equal, arithmetic


def test_two_runs_that_fail_alike_are_not_equal_and_two_that_skip_a_step_are() -> None:
    broken, skipped = record(math.nan, 4.0, 4.0), record(4.0, 4.0, 4.0, norms=(None, 0.5, 0.5))
    assert not compare(broken, broken, Arithmetic()).is_equal
    assert compare(skipped, skipped, Arithmetic("fp16")).is_equal


def test_stock_s_own_spread_is_allowed_and_named() -> None:
    """A GPU whose kernels add in any order: stock differs from itself, by a millionth here."""
    ours, again = record(4.0, 4.00001, 4.0), record(4.0, 4.000004, 4.0)
    assert not compare(STOCK, ours, Arithmetic()).is_equal
    verdict = compare(STOCK, ours, Arithmetic(), again)
    assert verdict.is_equal
    first, second, _ = verdict.of("loss")
    assert first.tolerance == BITS
    assert "stock differs from stock by 1e-06" in second.tolerance.why
    assert not compare(STOCK, record(4.0, 4.00002, 4.0), Arithmetic(), again).is_equal
    # A spread that is not finite allows nothing.
    assert not compare(STOCK, ours, Arithmetic(), record(4.0, math.nan, 4.0)).is_equal


def written(folder: Path, gradients: dict[str, torch.Tensor], rank: int = 0) -> RunRecord:
    run_record.write(folder, rank, STOCK.losses, STOCK.norms)
    gradients_file.write(folder, rank, gradients)
    return run_record.read(folder, 3)


def test_gradients_by_name(tmp_path: Path) -> None:
    weight = torch.linspace(-2, 1, 7)
    stock = written(tmp_path / "stock", {"a": weight, "b": weight})
    # The other placement has them on other ranks.
    written(tmp_path / "ours", {"b": weight})
    ours = written(tmp_path / "ours", {"a": weight * (1 + 2.0**-20)}, rank=1)
    verdict = compare(stock, ours, Arithmetic(), gradients=True)
    largest = verdict.largest("gradient")
    assert (largest.name, largest.is_equal) == ("a", False)
    assert largest.difference == pytest.approx(2.0**-20, rel=1e-3)
    assert [row.difference for row in verdict.of("gradient") if row.name == "b"] == [0.0]
    # More than two replicas are summed in another order.
    assert compare(stock, ours, Arithmetic(replicas=4), gradients=True).is_equal
    missing = written(tmp_path / "missing", {"a": weight})
    assert compare(stock, missing, Arithmetic(), gradients=True).largest("gradient").difference == math.inf
    stock = written(tmp_path / "column", {"a": torch.ones(4, 1), "b": torch.ones(0)})
    ours = written(tmp_path / "row", {"a": torch.ones(1, 4), "b": torch.ones(0)})
    rows = compare(stock, ours, Arithmetic(), gradients=True).of("gradient")
    assert [row.difference for row in rows] == [math.inf, 0.0]


@pytest.mark.parametrize(("precision", "within"), [("", 1e-5), ("--bf16", 2e-2)])
@pytest.mark.parametrize(
    ("flags", "apart"),
    [
        ("--mtp-num-layers 2", 2),
        ("--hybrid-layer-pattern *-|*-/*-", 1),
        (f"--mtp-num-layers 1 {UNTIED}", 0),
        (f"--mtp-num-layers 1 {UNTIED} --overlap-moe-expert-parallel-comm", 1),
    ],
)
def test_a_weight_that_is_used_in_several_places_has_a_wider_tolerance(
    precision: str, within: float, flags: str, apart: int, tmp_path: Path
) -> None:
    """The vocabulary's alone, where stock's sum is that of one backward and ours is not."""
    ends = ["output_layer.weight", "embedding.word_embeddings.weight"]
    weights = dict.fromkeys([*ends, "decoder.layers.1.weight"], torch.linspace(-2, 1, 7))
    stock = written(tmp_path / "stock", weights)
    off = {name: weight * (1 + 0.8 * within) for name, weight in weights.items()}
    arithmetic = Arithmetic.of_flags([*flags.split(), *precision.split()], 2)
    rows = compare(stock, written(tmp_path / "ours", off), arithmetic, gradients=True).of("gradient")
    assert {row.name for row in rows if row.is_equal} == (set(ends) if apart else set())
    assert {row.tolerance.allowed for row in rows} == {0, apart * within}


def test_records_that_are_no_run(tmp_path: Path) -> None:
    """One that is a run keeps every digit."""
    run_record.write(tmp_path, 0, [{}], [0.1])
    run_record.write(tmp_path, 1, [{"lm loss": LAST_BIT}], [0.1])
    whole = run_record.read(tmp_path, 1)
    assert (whole.losses, whole.norms) == (({"lm loss": LAST_BIT},), (0.1,))
    for loss, norm, steps, message in (
        (5.0, 0.1, 1, "report different losses"),
        (4.0, 0.2, 1, "report different gradient norms"),
        (4.0, 0.1, 3, "recorded 1 of 3 steps"),
    ):
        run_record.write(tmp_path, 0, [{"lm loss": 4.0}], [0.1])
        run_record.write(tmp_path, 1, [{"lm loss": loss}], [norm])
        with pytest.raises(ValueError, match=message):
            run_record.read(tmp_path, steps)
    with pytest.raises(ValueError, match="recorded 0 of 3 steps"):
        run_record.read(tmp_path / "nothing", 3)


def test_only_updates_before_a_step_excuse_it() -> None:
    """The second update is the first that is clipped: losses may differ from the third step on."""
    norms = (0.05, 0.5, 0.5)
    stock, clipped = record(4.0, 4.0, 4.0, norms=norms), Arithmetic(clip=0.1)
    assert not compare(stock, record(4.0, LAST_BIT, 4.0, norms=norms), clipped).is_equal
    assert compare(stock, record(4.0, 4.0, LAST_BIT, norms=norms), clipped).is_equal


def test_a_norm_may_move_more_than_a_loss() -> None:
    """In bf16 by four thousandths of it for each update behind a clipped step."""
    for moved, equal in (
        ((0, 0.003, 0), True),
        ((0, 0.005, 0), False),
        ((0, 0, 0.007), True),
        ((0, 0, 0.009), False),
    ):
        ours = record(4.0, 4.0, 4.0, norms=tuple(0.5 * (1 - share) for share in moved))
        assert compare(STOCK, ours, Arithmetic("bf16", clip=0.1)).is_equal is equal


@pytest.mark.parametrize(
    ("flags", "ranks", "replicas"),
    [
        ("", 4, 4),
        ("--pipeline-model-parallel-size 2", 4, 2),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2", 16, 2),
        ("--pipeline-model-parallel-size=4", 2, 1),
    ],
)
def test_replicas_are_what_the_model_leaves(flags: str, ranks: int, replicas: int) -> None:
    """The sum of two gradients has one order only, that of more has many."""
    words = flags.replace("=", " ").split()
    found = Arithmetic.of_flags(words, ranks)
    assert found.replicas == replicas
    assert (found.gradient("decoder.layers.1.mlp.linear_fc1.weight") == BITS) is (replicas <= 2)
    low = Arithmetic.of_flags([*words, "--bf16"], ranks).gradient("x").allowed
    assert low == (0.0 if replicas <= 2 else 2e-2)


def test_the_last_clip_grad_counts() -> None:
    """As for Megatron's parser."""
    assert Arithmetic.of_flags(["--clip-grad", "1", "--clip-grad", "0"], 1).clip == 0
    with pytest.raises(ValueError, match="--clip-grad needs a number"):
        Arithmetic.of_flags(["--clip-grad", "much"], 1)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("fp16", 1e-3), ("bf16", 2.0**-9)])
def test_a_shared_vocabulary_may_round_the_first_norm_once_more(precision: str, allowed: float) -> None:
    how = Arithmetic(precision, sums=VocabularyParallelism.sums[0])
    assert how.norms(RunRecord(({"lm loss": 1.0},), (1.0,)), 0).allowed == allowed
