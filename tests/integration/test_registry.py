"""What features and products register, and what is refused where the product of a flag registered nothing."""

from pathlib import Path

import pytest

from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.integration.registry import Registry
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners import step_runners, stock_steps
from megatron_pp_ext.integration.trainer import layout_finder
from megatron_pp_ext.integration.trainer.validation import read_flags
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.updates import Updates
from tests.support.flags import PP4, arguments

FLUSHED = Pipeline(named("1f1b", 2, 4))
PROFILED = Pipeline(named("1f1b", 2, 4), profile=Path("profile.json"))
ENDLESS = Pipeline(
    Request("pipedream", (linear(2),), 4, False, updates=Updates(1, "latest", False, Replicas.straight(2)))
)


def test_the_first_that_is_for_a_pipeline_is_found() -> None:
    registry = Registry[str]()
    assert registry.find(FLUSHED) is None
    registry.register("profile", when=lambda pipeline: pipeline.profile is not None, make="old")
    registry.register("all", when=lambda pipeline: True, make="any")
    registry.register("profile", when=lambda pipeline: pipeline.profile is not None, make="new")
    assert registry.find(FLUSHED) == "any"
    assert registry.find(PROFILED) == "new"


def test_a_pipeline_that_never_flushes_needs_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_runners.find(FLUSHED) is None
    assert step_runners.find(ENDLESS) is not None
    monkeypatch.setattr(step_runners, "_registry", Registry())
    with pytest.raises(ValueError, match=r"--pipeline-schedule pipedream needs a part .* not loaded"):
        step_runners.find(ENDLESS)


def test_a_profile_needs_who_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stock_steps._measure(PROFILED) is not None
    monkeypatch.setattr(stock_steps, "_registry", Registry())
    with pytest.raises(ValueError, match="--profile-pipeline needs a part"):
        stock_steps._measure(PROFILED)


def test_a_layout_needs_who_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_finder, "_finder", None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-layout auto needs a part .* not loaded"):
        read_flags(arguments(f"{PP4} --num-layers 9 --pipeline-model-parallel-layout auto"))
