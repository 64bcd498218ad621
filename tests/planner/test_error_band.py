"""The range in which to expect a step stands on runs that were alike, and is wider or withheld elsewhere."""

import pytest

from benchmarks.planner import error_ranges
from benchmarks.planner.error_ranges import covered, error, joined, range_of, replaced, stored, without
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.error_band import (
    BLACKWELL,
    EXPERTS_BLACKWELL,
    EXPERTS_HOPPER,
    HOPPER,
    SMALL,
    Band,
    validation,
)
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16 --swiglu "
    "--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 4"
)
DENSE = validation()["dense on Hopper"]


def estimated(*more: str, machine: str = "h100", length: int = 4096) -> Estimate:
    words = [*MODEL.split(), "--seq-length", str(length), "--max-position-embeddings", str(length), *more]
    asked = described.read(words, None).counted()
    gpus = 4 * (asked.parallel.context_parallel_size or 1)
    return estimate_request(asked, system.read(machine), for_world(asked, gpus))


def band(*more: str, machine: str = "h100", length: int = 4096) -> Band:
    found = estimated(*more, machine=machine, length=length).band
    assert found is not None
    return found


def test_a_job_like_published_runs_has_the_range_of_its_kind() -> None:
    shipped, found = validation()["dense in FP8 on Hopper"], band("--fp8-format", "hybrid")
    assert (found.low, found.high, found.unmeasured) == (shipped["low"], shipped["high"], ())
    made = f"made of {shipped['rows']} published runs of this kind (dense in FP8 on Hopper) by 4 publishers"
    assert f"{shipped['low']:.2f} to {shipped['high']:.2f} times the estimate: {made}, and" in str(found)
    assert "this kind (dense on Hopper) by one publisher, " in str(band())


@pytest.mark.parametrize(
    ("words", "machine", "kind"),
    [
        ((), "h200", "dense on Hopper"),
        ((), "gb200", "dense on Blackwell"),
        (("--fp4-format", "e2m1"), "gb300", "dense on Blackwell"),
        ((), "a100-80g", "dense on A100"),
        (("--num-experts", "8"), "h100", "experts on Hopper"),
        (("--num-experts", "8"), "b300", "experts on Blackwell"),
        (("--hidden-size", "1024"), "h100", "small models on one node"),
    ],
)
def test_kinds_are_of_models_precisions_and_families_of_devices(words, machine, kind) -> None:
    assert band(*words, machine=machine).kind == kind


@pytest.mark.parametrize(
    ("words", "changed", "what"),
    [
        (("--pipeline-schedule", "v-half"), {}, "under v-half"),
        ((), {"length": 32768}, "of sequences above 8,192 tokens"),
        (("--context-parallel-size", "8"), {}, "of more than 2 context-parallel ranks"),
        ((), {"machine": "mi300x"}, "on mi300x"),
    ],
)
def test_one_thing_that_no_run_had_makes_the_range_the_widest_of_all_kinds(words, changed, what) -> None:
    found = band(*words, **changed)
    every = validation().values()
    assert found.unmeasured == (what,)
    assert (found.low, found.high) == (min(o["low"] for o in every), max(o["high"] for o in every))
    assert f"none of {DENSE['rows']} published runs of this kind (dense on Hopper) was {what}; " in str(found)


def test_offloading_and_a_shared_vocabulary_are_unmeasured_too() -> None:
    plain = "--pipeline-schedule", "1f1b"
    assert band(*plain, "--pipeline-offload", "0.5").unmeasured == ("with activations on the host",)
    shared = band(*plain, "--pipeline-vocabulary", "shared")
    assert shared.unmeasured == ("with a shared vocabulary",)


def test_slices_and_documents_of_different_lengths_are_unmeasured_too() -> None:
    sliced = band("--pipeline-schedule", "1f1b", "--pipeline-slice-tokens", "2048")
    assert sliced.unmeasured == ("in slices of sequences",)
    varied = "with documents of different lengths"
    assert band().beyond(varied).unmeasured == (varied,)
    assert sliced.beyond(varied).low is None


def test_with_two_things_that_no_run_had_there_is_no_range() -> None:
    found = estimated("--pipeline-schedule", "zb-h1", machine="mi300x")
    assert found.band is not None and found.band.of(found.step_seconds) is None
    assert found.grounds.startswith("no range of times to expect: none of ")
    assert found.grounds.endswith(" was on mi300x, or under zb-h1")


def test_figures_say_what_the_runs_were() -> None:
    for shipped in validation().values():
        assert shipped["systems"] and shipped["schedules"]
        assert set(shipped["schedules"]) <= {"none", "1f1b", "interleaved"}
        assert shipped["low"] < 1 < shipped["high"]


EVERY = joined(stored())
SIZES = {kind: sum(map(len, group.values())) for kind, group in EVERY.items()}


def test_ranges_cover_eight_in_ten_steps_of_publishers_that_were_left_out() -> None:
    """The range of a step is made of all publishers but its own (benchmarks/results/error_ranges.md)."""
    counts = {kind: sum(group.values()) for kind, group in covered(EVERY).items()}
    large = {kind for kind in EVERY if kind != SMALL}
    for kinds in (set(EVERY), large):
        share = sum(counts[kind] for kind in kinds) / sum(SIZES[kind] for kind in kinds)
        assert 0.75 <= share <= 0.85
    shares = {kind: counts[kind] / SIZES[kind] for kind in EVERY}
    # The only publisher of a kind leaves a range of other kinds, which is wider than 15 runs of one job need.
    assert shares.pop(HOPPER) == 1
    # Dense steps on Blackwell are more alike than those of other kinds, which make a part of their range.
    assert shares.pop(BLACKWELL) >= 0.75
    assert all(0.75 <= share <= 0.85 for share in shares.values())


def test_a_kind_of_few_publishers_has_a_wider_range() -> None:
    """Here all publishers have the same rows, so that only their number makes a difference."""
    rows = [0.9, 0.95, 1.0, 1.05, 1.1]
    other = {"another": {"P": rows}}
    few, more, most = ({"kind": {name: rows for name in names}, **other} for names in ("A", "AB", "ABCD"))
    widths = [high / low for low, high in (range_of(every, "kind") for every in (few, more, most))]
    assert widths[0] > widths[1] > widths[2] > max(rows) / min(rows)


def test_a_left_out_publisher_does_not_move_its_own_range() -> None:
    every = {"kind": {"A": [0.9, 1.0, 1.1], "B": [5.0]}, "another": {"B": [5.0], "C": [1.0]}}
    assert covered(every)["kind"]["B"] == 0
    assert range_of(without(every, "B"), "kind")[1] < 2


def test_shipped_ranges_are_made_of_the_stored_ratios() -> None:
    """python -m benchmarks.planner.error_ranges writes both."""
    assert error_ranges.validation(EVERY, stored()["limits"]) == validation()


def test_errors_are_those_that_the_readme_states() -> None:
    """README.md, What you can trust: in whole percent, with the number of steps and those in their range."""
    errors = {kind: round(100 * error(group)) for kind, group in EVERY.items()}
    assert (errors.pop(EXPERTS_HOPPER), errors.pop(EXPERTS_BLACKWELL)) == (6, 9)
    assert (min(errors.values()), max(errors.values())) == (2, 7)
    inside = sum(sum(group.values()) for group in covered(EVERY).values())
    assert (sum(SIZES.values()), round(100 * inside / sum(SIZES.values()))) == (1122, 79)


def test_a_table_replaces_the_one_with_its_head() -> None:
    document = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n"
    made = "| a | b |\n| --- | --- |\n| 3 | 4 |\n| 5 | 6 |"
    assert replaced(document, made) == f"before\n\n{made}\n\nafter\n"
    with pytest.raises(ValueError, match="has no table with the head"):
        replaced("before\n", made)
