"""The table of NVIDIA's recipes: what it has of each, and that the document shows it."""

import pytest

from reference.pipelined_recipes import PipelinedRecipe, recipes
from scripts import recipes as table

PAIRS = "--overlap-moe-expert-parallel-comm"


def test_the_document_is_the_table() -> None:
    """Write it anew by ``python -m scripts.recipes``."""
    assert table.FILE.read_text() == table.text()


def test_every_recipe_has_a_pipeline_and_its_own_settings() -> None:
    assert len(recipes()) == 61
    assert len({(one.name, one.gpu, one.task, one.source, one.flags) for one in recipes()}) == 61
    assert all(int(one.value("--pipeline-model-parallel-size")) > 1 for one in recipes())


def first(**sought: str) -> PipelinedRecipe:
    """The first recipe with these values of fields."""
    return next(one for one in recipes() if all(getattr(one, key) == value for key, value in sought.items()))


def test_a_recipe_without_special_features_starts_both_ways() -> None:
    recipe = first(name="llama3-70b", precision="nvfp4")
    assert table.unchanged(recipe) == ("interleaved", "", False)
    assert table.replaced(recipe) == ("v-half", "", False)


def test_a_refused_recipe_names_the_flag_of_the_rule() -> None:
    assert (
        "--use-megatron-fsdp" in table.unchanged(first(name="llama3-70b", precision="fp8", task="sft")).error
    )


@pytest.mark.parametrize(
    ("layers", "stages", "predictions", "layout"),
    [(8, 4, 0, "Ett|tt|tt|ttL"), (6, 4, 1, "Ett|tt|t|tmL"), (2, 4, 0, "Et|t||L")],
)
def test_a_layout_is_as_even_as_can_be(layers: int, stages: int, predictions: int, layout: str) -> None:
    assert table.even_layout(layers, stages, predictions) == layout
