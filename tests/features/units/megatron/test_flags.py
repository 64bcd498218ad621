"""--pipeline-order: its default, what it cannot go with, and by which costs it orders."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.guided.order import ProfileSteps
from megatron_pp_ext.features.units.megatron import run_costs
from megatron_pp_ext.features.units.megatron.run_costs import RunCosts
from megatron_pp_ext.features.units.megatron.steps import Ordered, limits_of
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Ordering
from megatron_pp_ext.features.units.plan import Planner
from megatron_pp_ext.features.units.rates import EQUAL_AT, LengthCosts
from megatron_pp_ext.features.units.units import whole
from megatron_pp_ext.megatron.requested import Pipeline, Settings
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import CostModel, Costs, UnitCosts
from megatron_pp_ext.schedule.placement import v
from tests.support.flags import PP4, arguments, read, requested_by

# isort: split

STEP = Microbatches.of([[40, 3], [100], [7, 7, 7]])


def in_step(costs: run_costs.RunCosts, step: Microbatches = STEP) -> UnitCosts:
    """Return the costs of a step."""
    return costs.by_length(step).of(step)


def ordering(monkeypatch: pytest.MonkeyPatch, flags: str) -> Ordering | None:
    pipeline = read(monkeypatch, f"{PP4} {flags}")
    return None if pipeline is None else pipeline.request.option(Ordering)


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ("--pipeline-schedule 1f1b", None),
        ("--pipeline-schedule 1f1b --pipeline-order search", "search"),
        ("--pipeline-schedule 1f1b --pipeline-order rule --sft", "rule"),
        ("--pipeline-schedule 1f1b --sft", None),
        ("--pipeline-schedule v-half --dataloader-inter-document-masking", None),
        ("--pipeline-schedule 1f1b --sft --pipeline-order given", "given"),
        ("--pipeline-schedule flex --pipeline-memory-limit 0.9 --sft", None),
        ("--pipeline-trace trace.json --sft", None),
    ],
)
def test_the_order_of_the_data_stays_unless_another_one_is_asked_for(monkeypatch, tmp_path, flags, how):
    """Packed sequences have it too."""
    monkeypatch.chdir(tmp_path)
    found = ordering(monkeypatch, flags)
    if how is None:
        assert found is None
        return
    assert found.how == how
    words = {
        "given": "microbatches in the order of the data",
        "rule": "microbatches of unlike length ordered by the rule of the schedule, costs of the model's",
        "search": "microbatches of unlike length ordered as a search finds, costs of the model's layers",
    }
    assert found.about.startswith(words[how])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pipeline-order rule", "has no effect under Megatron's own schedules"),
        (
            "--pipeline-schedule pipedream-2bw --pipeline-allow-waits --pipeline-order rule",
            "update their weights between microbatches",
        ),
        (
            "--pipeline-schedule flex --pipeline-memory-limit 0.9 --pipeline-vocabulary shared "
            "--pipeline-order search",
            "does not place the parts of a vocabulary",
        ),
    ],
)
def test_orders_that_cannot_be(monkeypatch, flags, words):
    with pytest.raises(ValueError, match=words):
        read(monkeypatch, f"{PP4} {flags}")


def costs_of(pipeline: Pipeline) -> RunCosts:
    found = pipeline.request.option(Ordering)
    assert found is not None
    return RunCosts(pipeline, found)


def test_costs_are_those_of_the_models_layers(monkeypatch):
    pipeline = read(monkeypatch, f"{PP4} --pipeline-schedule 1f1b --pipeline-order rule")
    found = in_step(costs_of(pipeline))
    assert found.tokens == STEP.tokens
    middle = [unit.stages[1] for unit in found.units]
    # Scores take 4 h operations for each pair of tokens, and all else 24 h^2 for each token.
    ratios = [
        24 * 32 * tokens + 4 * squares for tokens, squares in zip(STEP.tokens, STEP.squares, strict=True)
    ]
    expected = [ratio / ratios[0] for ratio in ratios]
    assert [stage.forward / middle[0].forward for stage in middle] == pytest.approx(expected, rel=0.1)


def test_a_file_states_what_one_length_costs(monkeypatch, tmp_path):
    stage = {"forward": 2.0, "input_gradient": 2.0, "weight_gradient": 1.0}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": [stage] * 4, "sizes": {"seq_length": 32}}))
    flags = f"--pipeline-schedule 1f1b --pipeline-order rule --pipeline-costs {file}"
    pipeline = read(monkeypatch, f"{PP4} {flags}")
    assert f"costs from --pipeline-costs {file}" in pipeline.request.option(Ordering).about
    found = in_step(costs_of(pipeline), Microbatches.of([[32], [16, 16]]))
    assert found.units[0].stages[0].forward == pytest.approx(2)
    assert found.units[1].stages[0].forward < 2, "attention has a part of it"


def test_models_that_nobody_knows_are_ordered_as_one_of_7_billion(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run_costs, "print_rank_0", said.append)

    def unknown(*_: Any) -> CostModel:
        raise ValueError("cannot tell")

    request = named("1f1b", 4, 3).with_option(Ordering("rule"))
    found = costs_of(Pipeline(request, settings=Settings(estimate=CostModel(unknown, unknown))))
    again = LengthCosts.with_attention(Costs.per_rank(4), 1)
    assert in_step(found) == in_step(found) == again.of(STEP)
    assert len(said) == 1 and f"attention to {EQUAL_AT:,} tokens" in said[0]


def test_measured_steps_take_the_place_of_what_was_estimated(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run_costs, "print_rank_0", said.append)
    request = named("1f1b", 2, 3).with_option(Ordering("rule")).with_option(ProfileSteps(2, 3))
    found = costs_of(Pipeline(request))
    true = LengthCosts.with_attention(Costs.per_rank(2), 1, equal_at=50)
    steps = {number: Microbatches.of([[10 * number, 5], [60], [20] * number]) for number in (1, 2)}
    for number, microbatches in {0: STEP, **steps}.items():
        found.learn(SimpleNamespace(measured={}))  # type: ignore[arg-type]
        found.note(number, microbatches)
    measured = {number: true.of(microbatches).units for number, microbatches in steps.items()}
    found.learn(SimpleNamespace(measured=measured))  # type: ignore[arg-type]
    for unit, other in zip(in_step(found).units, true.of(STEP).units, strict=True):
        for stage, expected in zip(unit.stages, other.stages, strict=True):
            assert stage.forward == pytest.approx(expected.forward)
            assert stage.input_gradient == pytest.approx(expected.input_gradient)
    assert "by what 6 measured ones took: attention to 50 tokens" in said[0]


def test_a_limit_is_raised_to_the_largest_microbatch_in_all_chunks() -> None:
    placement, rates = v(2), LengthCosts.with_attention(Costs.per_rank(2, 2), 1)
    planner, units = Planner(placement, rates), whole([[10], [400], [30]])
    costs = planner.costs(units)
    limits = limits_of(named("flex", 2, 3, limit=0.01), planner, units)
    largest = costs.units[1].stages
    for rank, limit in enumerate(limits):
        first, second = placement.stages_of(rank)
        assert limit == pytest.approx(largest[first].activation + largest[second].activation)


def test_a_plan_is_of_the_schedule_in_force() -> None:
    """A schedule may change during a run, with as many microbatches as before."""
    steps = Ordered(Pipeline(named("1f1b", 2, 4)), Ordering("rule"))
    before, after = (catalog.build(name, 2, 4) for name in ("zb-h1", "1f1b"))
    templates = [
        steps.template(SimpleNamespace(schedule=schedule, may_move_weights=False))  # type: ignore[arg-type]
        for schedule in (before, before, after)
    ]
    assert templates[0] is templates[1] is not templates[2]
    assert [template.schedule for template in templates] == [before, before, after]


def test_the_schedule_settles_chunks_beside_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron builds a model of two chunks a rank, and saves the number of tokens with its flags."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} --num-layers 8 --pipeline-schedule v-half --pipeline-slice-tokens auto")
    found = requested_by(args)
    assert found is not None and found.placement.chunks == 2
    assert args.num_virtual_stages_per_pipeline_rank == 2
    assert args.pipeline_slice_tokens == args.seq_length
