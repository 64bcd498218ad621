"""The table of NVIDIA's recipes: what it has of each, and that the document shows it."""

import pytest

from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.schedule import catalog
from reference.pipelined_recipes import PipelinedRecipe, versions
from scripts import recipes as table
from scripts.recipe_steps import gpus_of, job_of, others, spelled_even, split, steps, unchanged


def test_the_document_is_the_table() -> None:
    """Write it anew by ``python -m scripts.recipes``, with ``--steps`` where there are new recipes."""
    assert table.FILE.read_text() == table.text()


def test_every_recipe_has_a_pipeline_and_its_own_settings() -> None:
    for version in versions():
        names = [recipe.recipe for recipe in version.recipes]
        assert len(set(names)) == len(names) >= 300
        assert all(recipe.arguments["pipeline_model_parallel_size"] > 1 for recipe in version.recipes)
        assert version.evaluated > 700 > len(version.not_evaluated)


def recipe(name: str) -> PipelinedRecipe:
    return next(each for each in versions()[0].recipes if each.name == name)


PLAIN = "llama3_70b_pretrain_64gpu_b200_nvfp4"


def test_a_recipe_without_special_features_starts_and_splits() -> None:
    job = job_of(recipe(PLAIN))
    assert unchanged(job, 64).starts
    assert split(job, 64).starts
    assert not unchanged(job, 64).is_unproved


def test_graphs_start_unproved_and_fsdp_does_not() -> None:
    job = job_of(recipe(PLAIN))
    graphs = job.with_arguments(cuda_graph_impl="transformer_engine")
    assert unchanged(graphs, 64).starts
    assert unchanged(graphs, 64).is_unproved
    assert unchanged(job.with_arguments(use_megatron_fsdp=True), 64).error == "--use-megatron-fsdp"


def test_what_rules_out_a_split_backward_is_named() -> None:
    job = job_of(recipe(PLAIN)).with_arguments(tp_comm_overlap=True, fp8="e4m3", fp4=None, fp8_recipe="mxfp8")
    assert unchanged(job, 64).starts
    assert split(job, 64).error == "--tp-comm-overlap"


def test_pairs_are_tried_under_schedules_that_have_some() -> None:
    job = job_of(recipe(PLAIN))
    assert len(list(others(job))) > 5
    paired = job.with_arguments(overlap_moe_expert_parallel_comm=True)
    assert [name for name, _ in others(paired) if catalog.entry(name).make_paired is None] == []


def test_a_recipe_without_a_config_json_is_counted_and_not_estimated() -> None:
    unknown = next(each for each in versions()[0].recipes if each.without_config)
    job = job_of(unknown)
    assert for_world(job, gpus_of(unknown, job)).microbatches > 0
    with pytest.raises(ValueError, match=r"no config\.json"):
        steps(unknown)


def test_better_steps_are_better() -> None:
    small = recipe("llama31_70b_sft_32gpu_h100_bf16")
    found = steps(small)
    assert found.shortest.seconds < found.own.seconds
    assert found.shortest.bytes <= max(found.device_bytes, found.own.bytes)
    assert found.leanest.bytes <= found.own.bytes
    assert found.leanest.seconds <= 1.005 * found.own.seconds
    stored = table._stored()[small.recipe]
    assert table._written(found) == table._written(stored)


@pytest.mark.parametrize(
    ("layers", "stages", "predictions", "layout"),
    [(8, 4, 0, "Ett|tt|tt|ttL"), (6, 4, 1, "Ett|tt|t|tmL"), (2, 4, 0, "Et|t||L")],
)
def test_a_layout_is_as_even_as_can_be(layers: int, stages: int, predictions: int, layout: str) -> None:
    assert spelled_even(layers, stages, predictions) == layout
