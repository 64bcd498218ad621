"""mpp calibrate on two forked ranks, with less to measure than in earnest."""

import os
import time
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.calibration import measure, ranks
from megatron_pp_ext.costs import system as systems

CPU = torch.device("cpu")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks see these as well."""
    monkeypatch.setattr(measure, "SECONDS", 0.005)
    monkeypatch.setattr(measure, "CPU_SHAPES", ((8, 8, 8), (4, 16, 8), (16, 16, 16)))
    monkeypatch.setattr(measure, "CPU_LENGTHS", (16, 64))
    monkeypatch.setattr(measure, "REDUCED_BYTES", (2**10, 2**14))
    monkeypatch.setattr(measure, "MESSAGE_BYTES", 2**14)
    monkeypatch.setattr(ranks, "available", lambda on_gpu: 2)


def test_an_action_takes_what_it_takes() -> None:
    assert measure.seconds_of(lambda: time.sleep(0.01), CPU) >= 0.01


def test_writes_a_system(brief: None, mpp, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    result = mpp("calibrate", file, "--cpu", "--accept-noise")
    assert result.exit_code == 0, result.output
    found = systems.read(str(file))
    assert [tuple(row[:3]) for row in found.matrix_rates["fp32"]] == list(measure.CPU_SHAPES)
    assert found.gpus_per_node == 2
    assert found.network == found.node
    assert found.kernel_seconds > 0
    for rows in (found.all_reduce, found.gather, found.all_to_all):
        assert [row[:2] for row in rows] == [[2, 2**10], [2, 2**14]]
    for field in ("matrix_rates", "copy_bytes_per_second", "attention_rates", "node", "network", "all_reduce",
                  "gather", "all_to_all", "memory_bytes"):  # fmt: skip
        assert field in found.sources


def test_an_estimate_takes_what_it_wrote_whatever_the_precision(brief, mpp, tmp_path, monkeypatch):
    """Where bf16 is much slower than fp32, as on cores that have no instructions for it, it has one row."""
    rates = {torch.float32: 1e11, torch.bfloat16: 1e9}
    monkeypatch.setattr(measure, "matrix_rate", lambda dtype, *rest: rates[dtype])
    calibrated = mpp("calibrate", tmp_path / "a.json", "--cpu", "--accept-noise")
    assert calibrated.exit_code == 0, calibrated.output
    for words in ([], ["--bf16"], ["--fp16"]):
        estimate = ("estimate", "--model", "llama3-8b", "--system", tmp_path / "a.json", "--")
        found = mpp(*estimate, "--tensor-model-parallel-size", 2, *words)
        assert found.exit_code == 0, found.output


@pytest.mark.parametrize(("waited", "refused"), [(0.2, True), (0.05, False), (None, False)])
def test_a_busy_machine_is_refused(waited, refused, brief, mpp, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks.ProcessorTime, "waited_since", lambda self, before: waited)
    result = mpp("calibrate", tmp_path / "a.json", "--cpu")
    assert (result.exit_code, (tmp_path / "a.json").exists()) == ((2, False) if refused else (0, True))
    assert ("waited for a processor for 20% of its time, more than 10%" in result.stderr) is refused


def test_what_is_not_measured_is_another_system_s(brief: None, mpp, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    assert mpp("calibrate", file, "--cpu", "--accept-noise", "--like", "h100").exit_code == 0
    found, like = systems.read(str(file)), systems.read("h100")
    assert (found.network, found.peak_rates, found.gpus_per_node) == (like.network, like.peak_rates, 8)
    fitted = ("processors", "around_loop", "kernel_seconds", "sustained", "reserved_bytes", "host",
              "host_memory_bytes_per_second", "exposed_sums", "persistent_products")  # fmt: skip
    assert all(getattr(found, name) == getattr(like, name) != 0 for name in fitted)
    assert found.sources["sustained"] == "h100's: not measured"
    assert found.sources["network"] == "h100's: not measured"


def test_one_device_has_links_only_of_another_system(brief, mpp, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "available", lambda on_gpu: 1)
    refused = mpp("calibrate", tmp_path / "a.json", "--cpu")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "one device has no links to measure; set --like" in refused.stderr
    assert (
        mpp("calibrate", tmp_path / "a.json", "--cpu", "--accept-noise", "--like", "a100-80g").exit_code == 0
    )
    assert systems.read(str(tmp_path / "a.json")).node == systems.read("a100-80g").node


@pytest.mark.parametrize("fails", [lambda device: 1 / 0, lambda device: os._exit(3)])
def test_a_rank_that_fails_ends_it(fails, brief, mpp, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "copy_rate", fails)
    result = mpp("calibrate", tmp_path / "a.json", "--cpu", "--accept-noise")
    assert result.exit_code == 2
    assert "a rank of the calibration" in result.stderr
    assert not (tmp_path / "a.json").exists()


def test_bad_input(mpp, tmp_path: Path) -> None:
    assert "no such folder; make it first" in mpp("calibrate", tmp_path / "no" / "a.json").stderr
    assert "--system h1000 is neither" in mpp("calibrate", tmp_path / "a.json", "--like", "h1000").stderr
