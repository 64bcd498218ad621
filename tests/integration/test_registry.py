"""What features and products register, and what is refused where the product of a flag registered nothing."""

from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments

from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.integration import step_runners
from megatron_pp_ext.integration.registry import Registry
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.trainer import layout_finder
from megatron_pp_ext.schedule.families.round_robin import Replicas
from megatron_pp_ext.schedule.placement import linear
from megatron_pp_ext.schedule.updates import Updates
from tests.support.flags import PP4, arguments, requested_by

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


@pytest.mark.parametrize(
    ("pipeline", "registry", "flag"),
    [
        (ENDLESS, step_runners.RUNNERS, "--pipeline-schedule pipedream"),
        (PROFILED, step_runners.MEASURES, "--profile-pipeline"),
    ],
)
def test_what_a_flag_needs_has_to_be_loaded(
    pipeline, registry, flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_runners.require_loaded(pipeline)
    step_runners.require_loaded(FLUSHED)
    monkeypatch.setattr(registry, "_entries", {})
    with pytest.raises(ValueError, match=f"{flag} needs a part .* not loaded"):
        step_runners.require_loaded(pipeline)
    step_runners.require_loaded(FLUSHED)


def test_a_flag_for_what_is_not_loaded_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(step_runners.MEASURES, "_entries", {})
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match=r"--profile-pipeline needs a part .* not loaded"):
        megatron_arguments.validate_args(arguments(f"{PP4} --profile-pipeline {tmp_path / 'profile.json'}"))


def test_a_layout_needs_who_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_finder, "_finder", None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-layout auto needs a part .* not loaded"):
        requested_by(arguments(f"{PP4} --num-layers 9 --pipeline-model-parallel-layout auto"))
