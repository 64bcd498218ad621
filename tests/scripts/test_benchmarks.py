"""Every benchmark can be imported, and answers --help; to run them all would take hours."""

import pkgutil
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

import benchmarks
from tests.support import ranks  # noqa: F401 - the stand-ins for torch.cuda, before Megatron is imported

MODULES = [
    module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.") if not module.ispkg
]
COMMANDS = {
    "gpu.beside", "gpu.check", "gpu.layers", "gpu.machine",
    "planner.accuracy", "planner.components", "planner.error_ranges", "planner.found_errors",
    "planner.found_factors",
    "planner.found_memory", "planner.host_memory", "planner.layouts", "planner.long_context",
    "planner.named_jobs",
    "planner.partition_costs", "planner.ratios", "planner.rehearsals", "planner.sweeps", "planner.trainers",
    "planner.training_runs", "planner.two_checkouts",
    "runtime.announced_shapes", "runtime.lengths", "runtime.offload", "runtime.pairs", "runtime.replicas",
    "runtime.slice_steps",
    "runtime.slices", "runtime.slow_links", "runtime.start_up", "runtime.step_log", "runtime.steps",
    "runtime.time_to_loss", "runtime.train", "runtime.vocabulary",
    "schedules.announced_shapes", "schedules.copies_to_host", "schedules.finer_units", "schedules.lengths",
    "schedules.lengths_packed",
    "schedules.lengths_within",
    "schedules.limits_by_rank", "schedules.other_lengths", "schedules.slices",
    "schedules.tables",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports_and_answers_help(name: str) -> None:
    main = getattr(import_module(name), "main", None)
    assert (main is not None) == (name.removeprefix("benchmarks.") in COMMANDS)
    if main is None:
        return
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
