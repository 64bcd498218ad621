"""From a rehearsal to training by measured costs: mpp rehearse, mpp estimate, mpp search, and a run."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_pp_ext import cpu
from megatron_pp_ext.cli import app
from megatron_pp_ext.cli import rehearse as command
from megatron_pp_ext.jobs import process
from megatron_pp_ext.megatron import releases
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.simulate import simulate
from tests.support import ranks, training

KEPT = (
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 1 "
    "--context-parallel-size 1 --expert-model-parallel-size 1"
)
HYBRID = (
    "--spec tests.support.hybrid_layers stack --position-embedding-type rope --num-experts 4 "
    "--moe-router-topk 2 --disable-bias-linear --hybrid-layer-pattern M-|*E|M-|ME --mamba-num-heads 4 "
    "--mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2"
)
FLEX = ("--pipeline-schedule", "flex", "--pipeline-memory-limit", "0.75")


def mpp(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{result.output}{result.exception}"


@training.since(releases.CORE_0_19, "before 0.19 building a hybrid model is left to its scripts")
def test_one_file_goes_from_a_rehearsal_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of a model like Nemotron's, with Mamba, count the weights that each rank was seen to hold."""

    def on_forked_ranks(commands: dict[int, tuple[list[str], dict[str, str]]], logs: object) -> None:
        def alone(rank: int) -> None:
            words, variables = commands[rank]
            os.environ.update(variables)
            training._train(rank, cpu.with_cpu_flags(words), training.initialize_by_layer, None)

        ranks.run_ranks(alone, len(commands))

    monkeypatch.setattr(process, "run_together", on_forked_ranks)
    monkeypatch.setattr(command, "training", lambda flags, **others: flags)
    costs, told, step, found = (tmp_path / f"{name}.json" for name in ("costs", "told", "step", "found"))
    flags = [*training.TINY[2:], *HYBRID.split(), *KEPT.split()]
    options = ["--ranks", "all", "--at-once", 2, "--iterations", 2, "--accept-noise"]
    of_v_half = [*flags, "--pipeline-schedule", "v-half"]
    mpp("rehearse", *options, "--costs", costs, "--json", told, "--", *of_v_half)
    mpp("estimate", "--no-ask", "--json", step, "--", *of_v_half, "--pipeline-costs", costs)
    measured, estimated = costs_file.read(costs), json.loads(step.read_text())
    hop = estimated["pipeline_seconds"] - simulate(catalog.build("v-half", 2, 8), measured).makespan
    assert 0 <= hop < 1e-2  # the file has none, and those of the system are short
    with pytest.raises(AssertionError, match="was measured with --micro-batch-size 1, not 2: measure"):
        mpp("estimate", "--no-ask", "--", *of_v_half, "--micro-batch-size", 2, "--pipeline-costs", costs)
    held = [rank["weights"] for rank in json.loads(told.read_text())["ranks"]]
    assert [rank["weights"] for rank in estimated["ranks"]] == held

    tried = ["--gpus", 2, "--schedules", "1f1b,v-half,v-zb", "--global-batch-size", 8, "--json", found]
    mpp("search", "--no-ask", *tried, "--", *flags, "--pipeline-costs", costs)
    best = json.loads(found.read_text())["best"][0]
    words = best["flags"]
    at = words.index("--pipeline-schedule")
    for ours in (words, [*words[:at], *words[at + 2 :], *FLEX]):
        assert len(training.train(2, [*ours, "--train-iters", "2"])[-1].losses) == 2
