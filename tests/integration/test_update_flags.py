"""What the schedules that never flush ask of the flags."""

import pytest

from megatron_pp_ext.job.updates import DelayCorrection
from megatron_pp_ext.schedule.families.pipedream import Weights
from tests.support.flags import PP4, assert_refused, read

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
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line(flags, monkeypatch):
    assert_refused(monkeypatch, flags, REFUSED[flags])


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
    assert read(monkeypatch, ONE.replace(UNTIED, "--pipeline-allow-waits --fp16")).updates.waits
