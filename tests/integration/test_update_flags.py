"""What the schedules that never flush ask of the flags."""

from megatron_pp_ext.schedule.families.pipedream import Weights
from megatron_pp_ext.schedule.updates import DelayCorrection
from tests.support.flags import PP4, read

UNTIED = "--untie-embeddings-and-output-weights"
ONE = f"{PP4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream"
TWO = f"{PP4} {UNTIED} --global-batch-size 4 --pipeline-schedule pipedream-2bw"


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
