"""What the schedules that never flush ask of the flags."""

from megatron_pp_ext.schedule.families.pipedream import WeightVersion
from tests.support.flags import PP4, read

UNTIED = "--untie-embeddings-and-output-weights"
ONE = f"{PP4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream"
TWO = f"{PP4} {UNTIED} --global-batch-size 4 --pipeline-schedule pipedream-2bw"


def test_what_the_flags_mean(monkeypatch):
    updates = read(monkeypatch, ONE).updates
    assert (updates.interval, updates.weights, updates.waits) == (1, WeightVersion.LATEST, False)
    assert read(monkeypatch, f"{ONE} --pipeline-vertical-sync").updates.weights is WeightVersion.SAME
    updates = read(monkeypatch, TWO).updates
    assert (updates.interval, updates.weights) == (4, WeightVersion.PREVIOUS)
    three = f"{ONE} --global-batch-size 3 --pipeline-update-interval 3"
    assert read(monkeypatch, three).updates.interval == 3
    assert read(monkeypatch, ONE.replace(UNTIED, "--pipeline-allow-waits --fp16")).updates.waits
