"""What the schedules that never flush ask of the flags."""

import pytest

from megatron_pp_ext.job.updates import DelayCorrection
from megatron_pp_ext.schedule.families.pipedream import Weights
from tests.support.flags import PP4, assert_refused, read
from tests.support.training import has_flag

UNTIED = "--untie-embeddings-and-output-weights"
ONE = f"{PP4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream"
TWO = f"{PP4} {UNTIED} --global-batch-size 4 --pipeline-schedule pipedream-2bw"

REFUSED = {
    f"{PP4} {UNTIED} --global-batch-size 8 --pipeline-schedule pipedream": (
        r"updates every 1 microbatch\(es\), but --global-batch-size makes 8 a step; set it to 1 x .*, "
        "or --pipeline-update-interval to 8"
    ),
    f"{ONE} --pipeline-update-interval 3": "updates every 3 .* but --global-batch-size makes 1 a step",
    f"{ONE} --pipeline-update-interval -1": "--pipeline-update-interval is -1, but must be 1 or more",
    f"{PP4} {UNTIED} --global-batch-size 3 --pipeline-schedule pipedream-2bw": "ranks, 4, but got 3; raise",
    f"{ONE} --num-virtual-stages-per-pipeline-rank 2": "has 1 chunk.s. a rank",
    ONE.replace(
        UNTIED, ""
    ): "does not support tied embeddings: .*; add --untie.*, or allow it with --pipeline-allow",
    f"{ONE} --fp16": "does not support --fp16: .*; use --bf16, or",
    f"{ONE} --calculate-per-token-loss": "--calculate-per-token-loss: all stages would wait",
    f"{ONE} --exit-signal-handler": "--exit-signal-handler: .*, or allow it",
    f"{ONE} --exit-duration-in-mins 5": "--exit-duration-in-mins",
    f"{ONE} --timing-log-level 1": "--timing-log-level: .*; add --no-barrier-with-level-1-timing",
    f"{TWO} --rampup-batch-size 4 4 8": "--rampup-batch-size: .*; leave one of the two out$",
    f"{ONE} --iterations-to-skip 3": "--iterations-to-skip: stages have read differently far",
    f"{ONE} --result-rejected-tracker-filename x": "--result-rejected-tracker-filename: stages have read",
    f"{ONE} --overlap-param-gather": "--overlap-param-gather",
    f"{ONE} --te-precision-config-file x": "cast for microbatch 0, which comes once in a run",
    f"{ONE} --moe-router-enable-expert-bias": "the bias has no versions",
    f"{PP4} --pipeline-schedule 1f1b --pipeline-update-interval 2": "update-interval has no meaning for",
    f"{PP4} --pipeline-schedule 1f1b --pipeline-vertical-sync": "--pipeline-vertical-sync has no meaning for",
    f"{PP4} --pipeline-schedule v-half --pipeline-delay-correction nesterov": (
        "--pipeline-delay-correction has no meaning for --pipeline-schedule v-half; .*, or choose pipedream"
    ),
    f"{ONE} --pipeline-delay-correction nesterov --optimizer muon": (
        "-correction nesterov does not support --optimizer: .* adam and sgd; .*, or .* error-feedback"
    ),
    f"{TWO} --pipeline-delay-correction nesterov --optimizer sgd --sgd-momentum 0": (
        "does not support --sgd-momentum 0: without momentum"
    ),
    f"{ONE} --pipeline-delay-correction nesterov --use-precision-aware-optimizer": "moments are not those of",
    f"{ONE} --pipeline-delay-correction nesterov --optimizer-cpu-offload": "its parts step on two devices",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line(flags, monkeypatch):
    assert_refused(monkeypatch, flags, REFUSED[flags])


def test_batches_that_grow_are_refused(monkeypatch):
    if not has_flag("--step-batch-size-schedule"):
        pytest.skip("this Megatron has no --step-batch-size-schedule")
    with pytest.raises(ValueError, match="--step-batch-size-schedule: the microbatches of an update cannot"):
        read(monkeypatch, f"{ONE} --step-batch-size-schedule 0:1")


def test_steps_that_may_run_again_are_refused(monkeypatch):
    if not has_flag("--moe-expert-rank-capacity-factor"):
        pytest.skip("this Megatron has no --moe-expert-rank-capacity-factor")
    with pytest.raises(ValueError, match="--moe-expert-rank-capacity-factor: it reads a step's samples"):
        read(monkeypatch, f"{ONE} --moe-expert-rank-capacity-factor 2")


def test_what_the_flags_mean(monkeypatch):
    updates = read(monkeypatch, ONE).updates
    assert (updates.interval, updates.weights, updates.waits) == (1, Weights.LATEST, False)
    assert read(monkeypatch, f"{ONE} --pipeline-vertical-sync").updates.weights is Weights.SAME
    updates = read(monkeypatch, TWO).updates
    assert (updates.interval, updates.weights) == (4, Weights.PREVIOUS)
    assert updates.correction is None
    for correction in DelayCorrection:
        flags = f"{TWO} --pipeline-delay-correction {correction}"
        assert read(monkeypatch, flags).updates.correction is correction
    assert read(monkeypatch, f"{flags} --optimizer sgd").updates.correction
    feedback = f"{TWO} --pipeline-delay-correction error-feedback --optimizer muon"
    assert read(monkeypatch, feedback).updates.correction is DelayCorrection.ERROR_FEEDBACK
    three = f"{ONE} --global-batch-size 3 --pipeline-update-interval 3"
    assert read(monkeypatch, three).updates.interval == 3


def test_waiting_can_be_allowed(monkeypatch):
    tied = ONE.replace(UNTIED, "--pipeline-allow-waits --fp16")
    assert read(monkeypatch, tied).updates.waits
