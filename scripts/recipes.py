"""Write docs/recipes.md: NVIDIA's recipes with a pipeline, and what a schedule of this package makes of each.

python -m scripts.recipes
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world, stock_schedule
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules.rule import Refused
from megatron_pp_ext.planner import described
from reference.pipelined_recipes import PipelinedRecipe, recipes
from scripts.refused import marked

FILE = Path(__file__).parents[1] / "docs" / "recipes.md"

LAYOUT, VIRTUAL = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
PAIRS, OVERLAP = "--overlap-moe-expert-parallel-comm", "--tp-comm-overlap"

FEATURES = {
    PAIRS: "pairs",
    "--cuda-graph-impl": "graphs",
    "--moe-flex-dispatcher-backend": "dispatcher",
    "--recompute-modules": "recompute",
    "--use-megatron-fsdp": "Megatron-FSDP",
    "--cpu-offloading-num-layers": "CPU offloading",
    OVERLAP: "TP overlap",
}
"""What decides whether a recipe is accepted, as the table names it."""

HEAD = """\
# NVIDIA's recipes

<!-- written by scripts/recipes.py from reference/pipelined_recipes.json -->

These are {count} configurations with more than one pipeline rank, published by NVIDIA or with NVIDIA's
software. The [stored settings](../reference/pipelined_recipes.json) name their sources. Configurations that
differ in batch and sequence alone are one row.

- **unchanged**: the recipe's own flags with `--pipeline-schedule interleaved`, or `1f1b` where a rank has one
  stage. {unchanged} start.
- **in place of its VPP**: two stages per rank, under `dualpipe-v` for pairs, under `1f1b-v` where
  `--tp-comm-overlap` with MXFP8 rules out a split backward, else under `v-half`. The layout spreads the
  layers evenly; `--pipeline-model-parallel-layout auto` finds a better one. {replaced} start.

A refusal names the flag; [the page on refusals](refused.md) has the reasons. Accepted means that no rule
rules it out and that the layers fill the stages; `--pipeline-unproved`, or `unproved=True` of `install`,
permits [CUDA graphs](gpu.md#cuda-graphs). HybridEP and DeepEP work within a layer's forward and backward,
which a schedule runs as Megatron does, so none of their flags is refused. Megatron-FSDP reduces gradients by
hooks of its own, and Megatron offloads whole layers to the CPU without pipelines alone: both are refused. No
GPU has trained these models here.
"""


class Tried(NamedTuple):
    """The ``schedule`` that was put in a recipe, and the ``error`` that refuses it; "" where it starts.

    It may start with --pipeline-unproved alone.
    """

    schedule: str
    error: str
    is_unproved: bool = False

    def cell(self) -> str:
        """Return a cell of the table."""
        accepted = "with `--pipeline-unproved`" if self.is_unproved else "accepted"
        return f"`{self.schedule}`: {self.error or accepted}"


def unchanged(recipe: PipelinedRecipe) -> Tried:
    """Put the schedule that Megatron would run into ``recipe``."""
    return _tried(recipe, stock_schedule(described.read(recipe.flags, recipe.model).job))


def replaced(recipe: PipelinedRecipe) -> Tried:
    """Put a schedule with two stages per rank into ``recipe``."""
    is_whole = recipe.has(OVERLAP) and recipe.precision == "mxfp8"
    name = "dualpipe-v" if recipe.has(PAIRS) else "1f1b-v" if is_whole else "v-half"
    asked = described.read(recipe.flags, recipe.model).job
    stages = 2 * asked.parallel.pipeline_model_parallel_size
    return _tried(
        recipe,
        name,
        pipeline_model_parallel_layout=even_layout(asked.model.layers, stages, asked.model.mtp_num_layers),
        num_virtual_stages_per_pipeline_rank=None,
        **dict.fromkeys(flag.removeprefix("--").replace("-", "_") for flag in layers.SPREAD),
    )


def even_layout(count: int, stages: int, predictions: int) -> str:
    """Return the layout of ``count`` layers in ``stages``, as evenly as can be, fewer where the loss is."""
    least, more = divmod(count, stages)
    sizes = [least + (stage < more) for stage in range(stages)]
    cells = ["t" * size for size in sizes]
    cells[0] = f"E{cells[0]}"
    cells[-1] += "m" * predictions + "L"
    return "|".join(cells)


def _tried(recipe: PipelinedRecipe, schedule: str, **changes: object) -> Tried:
    asked = described.read(recipe.flags, recipe.model).job
    asked = asked.with_arguments(pipeline_schedule=schedule, **changes)
    error, unproved = _error(recipe, asked), _error(recipe, asked.with_arguments(pipeline_unproved=True))
    return Tried(schedule, unproved, is_unproved=error != unproved)


def _error(recipe: PipelinedRecipe, asked: RequestedJob) -> str:
    try:
        for_world(asked, recipe.gpus)
    except Refused as error:
        return marked(error.rule.flag)
    except ValueError as error:
        return marked(str(error))
    return ""


def text() -> str:
    """Return the document."""
    tried = [(recipe, unchanged(recipe), replaced(recipe)) for recipe in recipes()]
    head = HEAD.format(
        count=len(tried),
        unchanged=sum(not tried_recipe.error for _, tried_recipe, _ in tried),
        replaced=sum(not tried_recipe.error for _, _, tried_recipe in tried),
    )
    rows = [
        f"| {_name(recipe)} | {recipe.gpus} {recipe.gpu.upper()}, {recipe.precision} | {_stages(recipe)} | "
        f"{', '.join(_features(recipe)) or 'none'} | {first.cell()} | {second.cell()} |"
        for recipe, first, second in tried
    ]
    columns = "| recipe | GPUs | p x chunks | asks for | unchanged | in place of its VPP |"
    return "\n".join([head, columns, "|---|---|---|---|---|---|", *rows, ""])


def _name(recipe: PipelinedRecipe) -> str:
    task = "" if recipe.task == "pre-training" else f", {recipe.task}"
    return f"{recipe.name}{task} ({recipe.source})"


def _stages(recipe: PipelinedRecipe) -> str:
    job = described.read(recipe.flags, recipe.model).job
    return f"{job.parallel.pipeline_model_parallel_size} x {layers.chunks_requested(job) or 1}"


def _features(recipe: PipelinedRecipe) -> Iterator[str]:
    for flag, name in FEATURES.items():
        if recipe.has(flag):
            value = recipe.value(flag)
            is_number = value.isdigit()
            yield f"{name} `{value}`" if value and not is_number else name


if __name__ == "__main__":
    FILE.write_text(text())
