"""The range in which to expect a step stands on runs that were alike, and is wider or withheld elsewhere."""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.error_band import Band, validation
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --bf16 --swiglu "
    "--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 4"
)
DENSE = validation()["dense"]


def estimated(*more: str, machine: str = "h100", length: int = 4096) -> Estimate:
    words = [*MODEL.split(), "--seq-length", str(length), "--max-position-embeddings", str(length), *more]
    asked = described.read(words, None).counted()
    gpus = 4 * (asked.parallel.context_parallel_size or 1)
    return estimate_request(asked, system.read(machine), for_world(asked, gpus))


def band(*more: str, machine: str = "h100", length: int = 4096) -> Band:
    found = estimated(*more, machine=machine, length=length).band
    assert found is not None
    return found


def test_a_job_like_published_runs_has_the_range_of_these() -> None:
    known, found = validation()["dense in FP8"], band("--fp8-format", "hybrid")
    assert (found.low, found.high, found.unmeasured) == (known["low"], known["high"], ())
    runs = f"8 in 10 of {known['rows']} published runs of this kind (dense in FP8) took "
    assert str(found).startswith(runs)


def test_runs_of_one_publisher_do_not_make_a_range_of_their_own() -> None:
    every, found = validation().values(), band()
    assert DENSE["publishers"] == found.publishers == 1
    assert (found.low, found.high) == (min(o["low"] for o in every), max(o["high"] for o in every))
    assert f"all {DENSE['rows']} published runs of this kind (dense) are of one publisher; " in str(found)


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
    assert f"none of {DENSE['rows']} published runs of this kind (dense) was {what}; " in str(found)


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
    for known in validation().values():
        assert known["systems"] and known["schedules"]
        assert set(known["schedules"]) <= {"none", "1f1b", "interleaved"}
        assert known["low"] < known["high"]
