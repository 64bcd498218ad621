"""What is refused where the product that a flag needs is not loaded."""

from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments

from megatron_pp_ext.compiler.request import Request, named
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates
from megatron_pp_ext.schedule.placement import linear
from tests.support.flags import PP4, arguments, requested_by

FLUSHED = Pipeline(named("1f1b", 2, 4))
PROFILED = Pipeline(named("1f1b", 2, 4), profile=Path("profile.json"))
ENDLESS = Pipeline(
    Request("pipedream", (linear(2),), 4, False, updates=Updates(1, "latest", False, Replicas.straight(2)))
)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without the other products."""
    monkeypatch.setattr(requested, "_loaded", requested.Products())
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize(
    ("pipeline", "flag"), [(ENDLESS, "--pipeline-schedule pipedream"), (PROFILED, "--profile-pipeline")]
)
def test_what_a_flag_needs_has_to_be_loaded(pipeline, flag, monkeypatch: pytest.MonkeyPatch) -> None:
    requested.loaded().require(pipeline)
    requested.loaded().require(FLUSHED)
    monkeypatch.setattr(requested, "_loaded", requested.Products())
    with pytest.raises(ValueError, match=f"{flag} needs a part .* not loaded"):
        requested.loaded().require(pipeline)
    requested.loaded().require(FLUSHED)


@pytest.mark.usefixtures("_alone")
def test_a_flag_for_what_is_not_loaded_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--profile-pipeline needs a part .* not loaded"):
        megatron_arguments.validate_args(arguments(f"{PP4} --profile-pipeline {tmp_path / 'profile.json'}"))


@pytest.mark.usefixtures("_alone")
def test_a_layout_needs_who_finds_it() -> None:
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-layout auto needs a part .* not loaded"):
        requested_by(arguments(f"{PP4} --num-layers 9 --pipeline-model-parallel-layout auto"))
