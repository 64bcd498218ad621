"""Write docs/recipes.md: Megatron-Bridge's recipes with a pipeline, and what schedules make of each.

python -m scripts.recipes          the page, with the steps that are stored
python -m scripts.recipes --steps  estimate all steps anew before, in minutes

`python -m scripts.bridge_recipes` stores the recipes themselves; neither that nor Megatron is needed here.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from reference.pipelined_recipes import PipelinedRecipe, Version, versions
from scripts.recipe_steps import Step, Steps, Verdict, gpus_of, job_of, split, steps, stock, unchanged
from scripts.refused import marked

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "recipes.md"
STEPS = ROOT / "benchmarks" / "results" / "recipe_steps.json"

HEAD = """\
# NVIDIA's recipes

<!-- written by scripts/recipes.py from reference/pipelined_recipes and its own benchmarks/results -->

Megatron-Bridge ships its recipes as functions. `python -m scripts.bridge_recipes` evaluates all of them,
without a GPU, and stores what those with a pipeline set; this page is written from there. It has the recipes
of release {release}, and in the next table those of {others} too. One recipe is read by

<!-- not run in tests: needs the network -->
```bash
mpp estimate --recipe \\
  megatron.bridge.recipes.qwen.h100.qwen3_moe:qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config
```

A recipe **starts as it is** where nothing is added to it but the name of its own schedule, `interleaved`, or
`1f1b` where a rank has one chunk. It **can split** its backward where `zb-h1`, `interleaved-zb` or a V is
accepted in the place of that; a refusal names the flag, and [the page on refusals](refused.md) has the
reasons. CUDA graphs under a schedule were never run on a GPU here: `--pipeline-unproved`, or `unproved=True`
of `install`, [permits them](gpu.md#cuda-graphs). No GPU has trained these models under our schedules.

m/p is the number of microbatches for each rank, and (p-1)/(vm) the bubble of an interleaved schedule with
even stages.
"""

GAINS = """\
## What schedules would gain

By the [planner](planner.md), at the rates of the recipe's own GPU: the recipe under its own schedule, and
under all of ours that its flags permit, with the same tensor, pipeline, context and expert parallelism,
microbatch, batch, precision and recomputation. A schedule with the recipe's number of chunks keeps its
layout, `zb-h1` takes one of `auto` too; a V has stages of as many layers each, or those of `auto`.

- **shortest** is the shortest step that fits the GPU, or that needs no more than the recipe's own where that
  is above the GPU's memory by its estimate.
- **leanest** is the step with the least memory on the fullest rank that is no longer than the recipe's own,
  by half a percent at most.

Estimates of the bubble are above (p-1)/(vm) where stages are uneven and where ranks wait for messages. Of
what CUDA graphs keep they count [the slots](gpu.md#cuda-graphs) of our schedules, and leave out the
graphs of Megatron's own and those of whole iterations. The error of estimates ([accuracy](planner.md)) is
larger than many a gain. Of a model that sees images only the language model is estimated, and the image
encoder would lengthen the first stage.
"""


@dataclass(frozen=True, eq=False)
class Row:
    """A recipe with what becomes of it.  ``stock`` is whether Megatron itself can start it."""

    recipe: PipelinedRecipe
    job: RequestedJob
    gpus: int
    stock: Verdict
    unchanged: Verdict
    split: Verdict

    @property
    def ranks(self) -> int:
        return self.job.parallel.pipeline_model_parallel_size

    @property
    def chunks(self) -> int:
        return layers.chunks_requested(self.job) or 1

    @property
    def per_rank(self) -> float:
        """The microbatches of a step for each pipeline rank."""
        return for_world(self.job, self.gpus).microbatches / self.ranks

    @property
    def bubble(self) -> float:
        """The bubble of its own schedule if all stages were even, as a part of the rest."""
        return (self.ranks - 1) / self.ranks / self.chunks / self.per_rank


@cache
def rows(version: Version) -> tuple[Row, ...]:
    """Return the rows of ``version``."""
    return tuple(map(_row, version.recipes))


def _row(recipe: PipelinedRecipe) -> Row:
    job = job_of(recipe)
    gpus = gpus_of(recipe, job)
    by_megatron = stock(job, gpus)
    if not by_megatron.starts:
        return Row(recipe, job, gpus, by_megatron, by_megatron, by_megatron)
    return Row(recipe, job, gpus, by_megatron, unchanged(job, gpus), split(job, gpus))


FEATURES: dict[str, Callable[[Row], Any]] = {
    "all": lambda row: True,
    "VPP": lambda row: row.chunks > 1,
    "a layout": lambda row: row.job.pipeline.pipeline_model_parallel_layout,
    "FP8, MXFP8, NVFP4": lambda row: row.job.precision.fp8 or row.job.precision.fp4,
    "MTP": lambda row: row.job.model.mtp_num_layers,
    "CP": lambda row: row.job.parallel.context_parallel_size > 1,
    "pairs": lambda row: row.job.parallel.overlap_moe_expert_parallel_comm,
    "TP overlap": lambda row: row.job.parallel.tp_comm_overlap,
    "graphs `transformer_engine`": lambda row: row.job.precision.cuda_graph_impl == "transformer_engine",
    "graphs `full_iteration`": lambda row: row.job.precision.cuda_graph_impl == "full_iteration",
    "graphs `local`": lambda row: row.job.precision.cuda_graph_impl == "local",
    "optimizer-step gather": lambda row: row.job.is_set("--overlap-param-gather-with-optimizer-step"),
    "defer-embedding": lambda row: row.job.parallel.defer_embedding_wgrad_compute,
    "op fuser": lambda row: row.job.precision.use_transformer_engine_op_fuser,
    "paged stash": lambda row: row.job.precision.moe_paged_stash,
    "full recomputation": lambda row: row.job.memory.recomputes_layers,
    "packed sequences": lambda row: any("packed" in note for note in row.recipe.notes),
    "images": lambda row: any("image" in note for note in row.recipe.notes),
    "adapters alone": lambda row: row.recipe.trains_adapters,
    "Muon": lambda row: "muon" in row.job.memory.optimizer,
    "Megatron-FSDP": lambda row: row.job.memory.use_megatron_fsdp,
}
"""What recipes ask for, as the tables name it."""

_PLAIN = {"all", "VPP", "a layout", "FP8, MXFP8, NVFP4"}
"""The features that every other recipe has, and that decide nothing."""


def text() -> str:
    """Return the document."""
    newest, *others = versions()
    commits = " and ".join(f"commit {other.version}" for other in others) or "no other version"
    parts = [
        HEAD.format(release=newest.version, others=commits),
        _counts(),
        _features(rows(newest)),
        GAINS,
        _gains(newest),
        _families(newest),
        _not_evaluated(newest),
    ]
    return "\n".join(parts)


def _table(columns: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def _counts() -> str:
    """Return the table of recipes that start and that can split, by version and group."""
    groups = [
        (f"{version.version}, {name}", list(chosen))
        for version in versions()
        for name, chosen in _grouped(rows(version)).items()
    ]
    lines: list[tuple[str, Callable[[list[Row]], object]]] = [
        ("with a pipeline", len),
        ("median m/p", lambda some: f"{median(row.per_rank for row in some if row.stock.starts):.3g}"),
        ("median (p-1)/(vm)", lambda some: f"{median(row.bubble for row in some if row.stock.starts):.1%}"),
        ("Megatron itself refuses", lambda some: sum(not row.stock.starts for row in some)),
        ("start as they are", lambda some: sum(_is_plain(row.unchanged) for row in some)),
        ("start with `--pipeline-unproved`", lambda some: _share(some, "unchanged")),
        ("refused", lambda some: _flags(row.unchanged for row in some if row.stock.starts)),
        ("can split as they are", lambda some: sum(_is_plain(row.split) for row in some)),
        ("can split with `--pipeline-unproved`", lambda some: _share(some, "split")),
        ("splitting refused", lambda some: _flags(row.split for row in some if row.stock.starts)),
    ]
    cells = [[name, *(count(some) for _, some in groups)] for name, count in lines]
    return "## How many start\n\n" + _table(["recipes", *(name for name, _ in groups)], cells)


def _grouped(some: Iterable[Row]) -> dict[str, list[Row]]:
    result: dict[str, list[Row]] = {"performance": [], "library": []}
    for row in some:
        result["performance" if row.recipe.is_for_performance else "library"].append(row)
    return result


def _is_plain(verdict: Verdict) -> bool:
    return verdict.starts and not verdict.is_unproved


def _share(some: Sequence[Row], name: str) -> str:
    """Return how many of ``some`` start, with --pipeline-unproved or without, and their part of all."""
    able = [row for row in some if row.stock.starts]
    count = sum(getattr(row, name).starts for row in able)
    return f"{count} ({count / len(able):.0%})"


def _flags(verdicts: Iterable[Verdict]) -> str:
    counts = Counter(_reason(each) for each in verdicts if each.error)
    return "<br>".join(f"{count} by {flag}" for flag, count in counts.most_common()) or "0"


def _reason(verdict: Verdict) -> str:
    """Return the flag that refuses, or other words in short."""
    flag, *_ = verdict.error.partition(":")
    return marked(flag)


def _features(some: Sequence[Row]) -> str:
    cells = []
    for name, has in FEATURES.items():
        having = [row for row in some if has(row) and row.stock.starts]
        if having:
            counts = (
                sum(_is_plain(row.unchanged) for row in having),
                sum(row.unchanged.starts for row in having),
                sum(_is_plain(row.split) for row in having),
                sum(row.split.starts for row in having),
            )
            cells.append([name, len(having), *counts])
    columns = ["asks for", "recipes", "start", "with unproved", "can split", "with unproved"]
    return "By feature, of the release, without those that Megatron itself refuses:\n\n" + _table(
        columns, cells
    )


def _gains(version: Version) -> str:
    """Return the table of gains by group, and why others have no estimate."""
    stored = _stored()
    cells = []
    for name, some in _grouped(rows(version)).items():
        results = [(row, stored[row.recipe.recipe]) for row in some]
        pairs = [(row, each) for row, each in results if isinstance(each, Steps)]
        cells.append(
            [
                name,
                len(pairs),
                f"{median(row.per_rank for row, _ in pairs):.3g}",
                f"{median(row.bubble for row, _ in pairs):.1%}",
                f"{median(each.bubble for _, each in pairs):.1%}",
                _spread([each.shorter for _, each in pairs]),
                _spread([each.leaner for _, each in pairs]),
                f"{median((each.own.bytes - each.leanest.bytes) / 1e9 for _, each in pairs):.1f} GB",
            ]
        )
    columns = [
        "group",
        "estimated",
        "m/p",
        "(p-1)/(vm)",
        "bubble by estimate",
        "step time saved, shortest",
        "memory saved, leanest",
        "in GB",
    ]
    reasons = Counter(each for row in rows(version) if isinstance(each := stored[row.recipe.recipe], str))
    without = "; ".join(f"{count} ({_short_reason(reason)})" for reason, count in reasons.most_common())
    return (
        _table(columns, cells)
        + "\nAll columns are medians; of what is saved the least of the best tenth follows.\n"
        + f"{_where_memory_gains(version)}\nWithout an estimate: {without}.\n"
        + _by_bubble(version)
    )


def _where_memory_gains(version: Version) -> str:
    """Return a sentence about the performance recipes whose bubble is small."""
    stored, some = _stored(), _grouped(rows(version))["performance"]
    estimates = [each for row in some if isinstance(each := stored[row.recipe.recipe], Steps)]
    small = [each for each in estimates if each.bubble < _SMALL]
    return (
        f"Of the {len(estimates)} performance recipes {len(small)} have a bubble below {_SMALL:.0%}: there "
        f"the median step is {median(each.shorter for each in small):.1%} shorter, or as long with "
        f"{median(each.leaner for each in small):.1%} less memory."
    )


_SMALL = 0.07
"""The bubble below which schedules save little time."""


def _by_bubble(version: Version) -> str:
    """Return the table of gains by the bubble of the recipe's own schedule."""
    stored = _stored()
    estimates = [each for row in rows(version) if isinstance(each := stored[row.recipe.recipe], Steps)]
    bounds = ((0, 0.03), (0.03, 0.07), (0.07, 0.15), (0.15, 1.01))
    cells = []
    for least, most in bounds:
        some = [each for each in estimates if least <= each.bubble < most]
        if some:
            name = f"{least:.0%} to {most:.0%}" if most < 1 else f"from {least:.0%} on"
            cells.append(
                [name, len(some), _spread([s.shorter for s in some]), _spread([s.leaner for s in some])]
            )
    columns = ["bubble by estimate", "recipes", "step time saved, shortest", "memory saved, leanest"]
    return "\n" + _table(columns, cells)


def _short_reason(reason: str) -> str:
    return marked(reason.partition(":")[0].partition(";")[0].removesuffix("."))


def _spread(parts: Sequence[float]) -> str:
    """Return the median and the least of the best tenth."""
    return f"{median(parts):.1%}, {sorted(parts)[int(0.9 * len(parts))]:.0%}"


def _families(version: Version) -> str:
    parts = [
        "## All recipes of the release\n",
        "GPUs are those in the name of a recipe, or the fewest that hold it where these are too few. Seconds",
        "and GB of the fullest rank are estimates. A layout that is not the recipe's own is named.\n",
    ]
    by_family = sorted(rows(version), key=lambda row: (row.recipe.family, not row.recipe.is_for_performance))
    for family, some in groupby(by_family, key=lambda row: row.recipe.family):
        members = list(some)
        parts += [
            f"<details><summary>{family}, {len(members)} recipes</summary>\n",
            _family(members),
            "</details>\n",
        ]
    return "\n".join(parts)


def _family(some: Iterable[Row]) -> str:
    columns = ["recipe", "GPUs", "p x v, m/p", "asks for", "as it is", "split", "own", "shortest", "leanest"]
    return _table(columns, map(_cells, some))


def _cells(row: Row) -> list[str]:
    recipe, result = row.recipe, _stored()[row.recipe.recipe]
    features = [name for name, has in FEATURES.items() if name not in _PLAIN and has(row)]
    sizes = f"{row.ranks} x {row.chunks}"
    if isinstance(result, Steps):
        sizes += f", {result.microbatches / row.ranks:.3g}"
        step_cells = [_step(result.own), _better(result.shortest, result), _better(result.leanest, result)]
    else:
        step_cells = [_short_reason(result), "", ""]
    group = "" if recipe.is_for_performance else " (library)"
    verdicts = (
        [_verdict(row.unchanged), _verdict(row.split)] if row.stock.starts else ["Megatron refuses", ""]
    )
    gpus = f"{row.gpus} {recipe.device.upper()}"
    return [f"{recipe.name}{group}", gpus, sizes, ", ".join(features), *verdicts, *step_cells]


def _verdict(verdict: Verdict) -> str:
    if verdict.error:
        return _reason(verdict)
    return "unproved" if verdict.is_unproved else "yes"


def _step(step: Step) -> str:
    words = f"`{step.schedule}`" if step.layout == "own" else f"`{step.schedule}` {step.layout}"
    return f"{words}: {step.seconds:.3g} s, {step.bytes / 1e9:.0f} GB"


def _better(step: Step, steps_of_recipe: Steps) -> str:
    return "its own" if step == steps_of_recipe.own else _step(step)


def _not_evaluated(version: Version) -> str:
    """Return the recipes that could not be evaluated, and the models whose sizes are not known."""
    models = Counter(recipe.without_config for recipe in version.recipes if recipe.without_config)
    unknown = ", ".join(f"{name} ({count})" for name, count in sorted(models.items()))
    lines = [f"- `{name}`: {marked(reason)}" for name, reason in version.not_evaluated.items()]
    count = version.evaluated + len(lines)
    return "\n".join(
        [
            "## What could not be evaluated\n",
            f"Of {count} recipes {len(lines)}, with a pipeline or without:\n",
            *lines,
            "\nOf these models no config.json was at hand. Their recipes have flags and no sizes, are",
            f"counted above and not estimated: {unknown}.\n",
        ]
    )


@cache
def _stored() -> dict[str, Steps | str]:
    """Return the steps that are stored by recipe, or why there are none."""
    content = json.loads(STEPS.read_text(encoding="utf-8"))
    return {name: each if isinstance(each, str) else _read(each) for name, each in content["steps"].items()}


def _read(content: dict[str, Any]) -> Steps:
    made = {name: Step(*content[name]) for name in ("own", "shortest", "leanest")}
    return Steps(**{**content, **made})


def _written(each: Steps | str) -> Any:
    if isinstance(each, str):
        return each
    content = asdict(each)
    for name in ("own", "shortest", "leanest"):
        step = getattr(each, name)
        content[name] = [step.schedule, step.layout, float(f"{step.seconds:.5g}"), float(f"{step.bytes:.5g}")]
    return {**content, "bubble": float(f"{each.bubble:.4g}")}


def estimate() -> None:
    """Estimate the steps of the newest version's recipes, equal jobs once, and store them."""
    newest = versions()[0].recipes
    keys = {recipe.recipe: _key(recipe) for recipe in newest}
    jobs = {keys[recipe.recipe]: recipe for recipe in newest}
    results: dict[str, Steps | str] = {}
    with ProcessPoolExecutor() as pool:
        tasks = {pool.submit(_steps_or_reason, recipe): key for key, recipe in jobs.items()}
        for task in as_completed(tasks):
            results[tasks[task]] = task.result()
            print(f"\r{len(results)} of {len(jobs)} jobs", end="", flush=True)
    print()
    lines = [f"  {json.dumps(name)}: {json.dumps(_written(results[key]))}" for name, key in keys.items()]
    head = json.dumps({"version": versions()[0].version})[:-1]
    STEPS.write_text(f'{head},\n "steps": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    _stored.cache_clear()


def _key(recipe: PipelinedRecipe) -> str:
    about = [recipe.device, recipe.gpus, recipe.without_config is None, recipe.trains_adapters]
    return json.dumps([*about, dict(recipe.arguments)], sort_keys=True)


def _steps_or_reason(recipe: PipelinedRecipe) -> Steps | str:
    try:
        return steps(recipe)
    except ValueError as error:
        return str(error)


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", action="store_true", help="estimate all steps anew")
    if parser.parse_args().steps:
        estimate()
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
