"""What is an uneven layout worth, and does the search find what others recommend?

python -m benchmarks.planner.layouts        # 10 minutes of a core; writes results/layouts.md
"""

import time
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import typer

from benchmarks.report import RESULTS, Out, Row, publish, sections, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world, permitted
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.search.result import Compiles, SearchResult, why
from megatron_pp_ext.planner.step.error_band import HEADROOM
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import FLEX
from reference.recipes import DEEPSEEK_V3, RECIPES, Recipe

MACHINE = system.read("h100")
LIMIT = (1 - HEADROOM) * MACHINE.memory_bytes

_LIKE_LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
_TRAINING = {
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "grad_reduce_in_bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def _dense(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": groups,
        "vocab_size": vocabulary,
    }


_GEMMA_2B = _dense(32, 2304, 9216, 8, 4, 256000) | {"kv_channels": 256}
_GEMMA_9B = _dense(32, 3584, 14336, 16, 8, 256000) | {"kv_channels": 256}
_GEMMA_27B = _dense(64, 4608, 36864, 32, 16, 256000) | {"kv_channels": 128}
_LLAMA_8B = _dense(32, 4096, 14336, 32, 8, 128256)
_DEEPSEEK = DEEPSEEK_V3 | {"hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 10944}
_DEEPSEEK_LITE = _DEEPSEEK | {
    "num_layers": 32,
    "moe_layer_freq": [0] + [1] * 31,
    "num_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "vocab_size": 102400,
    "mtp_num_layers": None,
}
_WITH_PREDICTION = _DEEPSEEK_LITE | {"mtp_num_layers": 1, "moe_layer_freq": [0] * 3 + [1] * 29}

HETEROGENEOUS: Sequence[tuple[str, Mapping[str, Any], int, int, int]] = (
    ("like Llama 3 8B, 32 layers", _LLAMA_8B, 1, 1, 4),
    ("like Llama 3 8B, 32 layers", _LLAMA_8B, 1, 1, 8),
    ("like Gemma 2 2B, 32 layers", _GEMMA_2B, 1, 1, 4),
    ("like Gemma 2 2B, 32 layers", _GEMMA_2B, 1, 1, 8),
    ("like Gemma 2 9B, 32 layers", _GEMMA_9B, 2, 1, 4),
    ("like Gemma 2 9B, 32 layers", _GEMMA_9B, 2, 1, 8),
    ("like Gemma 2 27B, 64 layers", _GEMMA_27B, 4, 1, 4),
    ("like Gemma 2 27B, 64 layers", _GEMMA_27B, 4, 1, 8),
    ("like DeepSeek-V2-Lite, 32 layers, 1 dense", _DEEPSEEK_LITE, 1, 4, 4),
    ("like DeepSeek-V2-Lite, 32 layers, 1 dense", _DEEPSEEK_LITE, 1, 4, 8),
    ("the same, 3 dense, with multi-token prediction", _WITH_PREDICTION, 1, 4, 4),
    ("the same, 3 dense, with multi-token prediction", _WITH_PREDICTION, 1, 4, 8),
)
"""Models with their tensor, expert and pipeline parallelism."""


_SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
    "micro_batch_size",
    "recompute_granularity",
)
"""The arguments that a comparison of layouts and schedules leaves as they are."""

_STOCK = ("1f1b", "interleaved")


def heterogeneous_models() -> str:
    """Simulated seconds of a step on H100, with 4 microbatches of 4,096 tokens for each rank of the pipeline.

    Sizes of parallelism are given, nothing is recomputed, and 6% of the memory stay free.
    `--tp-comm-overlap` is off.  *even interleaved* is the best
    of Megatron's 1F1B and interleaved 1F1B with equally many layers in all stages.  *its layout* is the best
    of the two with any layout, *schedules* the best of all schedules, compiled ones among them, with equally
    many layers, and *both* the best of all schedules with any layout; in brackets, how many times shorter
    than even interleaved.

    AdaPtis (arXiv 2509.23722) reports 1.42 times on average, and 2.14 at most, over even interleaved.  It was
    measured on models of these kinds, with large vocabularies or with layers of several kinds, of sizes that
    are not those of the table, and on Nemotron-H, which is not in the table.
    """
    rows: list[Row] = []
    speedups: list[list[float]] = []
    for name, model, tensor, expert, ranks in HETEROGENEOUS:
        job = _described(
            {
                **_LIKE_LLAMA,
                **model,
                "tensor_model_parallel_size": tensor,
                "expert_model_parallel_size": expert,
                "expert_tensor_parallel_size": 1 if model.get("num_experts") else None,
                "pipeline_model_parallel_size": ranks,
            },
            4096,
            4 * ranks * expert,
        )
        results = [
            _search(job, tensor * expert * ranks, schedules, is_uneven, _SIZES).best[0]
            for schedules in (_STOCK, catalog.NAMES)
            for is_uneven in (False, True)
        ]
        base, *other_steps = (result.estimate.step_seconds for result in results)
        speedups.append([base / other for other in other_steps])
        cells = [f"{other:.3f} ({base / other:.2f}x)" for other in other_steps]
        sizes = " ".join(
            f"{letters}{size}" for letters, size in (("TP", tensor), ("EP", expert), ("PP", ranks))
        )
        rows.append((name, sizes, f"{base:.3f}", *cells, _about(results[-1])))
    mean = [f"{geometric_mean(column):.2f}x" for column in zip(*speedups, strict=True)]
    rows.append(("geometric mean", "", "", *mean, ""))
    return table(("model", "on", "even interleaved", "its layout", "schedules", "both", "best of both"), rows)


def recipes() -> str:
    """Simulated steps of configurations that NVIDIA recommends for H100, beside the best that searches find.

    ``reference/recipes.py`` has the sources.  All are in bf16, gradients too, with `--tp-comm-overlap`.  The
    searches choose everything but the batch, the sequence and the number of GPUs, once among stock's
    schedules, 1F1B and interleaved, and once among all that allow that flag, which do not split backwards.

    The recipe for DeepSeek-V3 is far behind because its experts are on 64 GPUs, which are 8 nodes.  Outside
    of pairs the planner counts all of their all-to-all, over the network, as time in which nothing else runs.
    In pairs, where what `--overlap-moe-expert-parallel-comm` hides is counted, all candidates of its searches
    are in pairs.
    """
    rows: list[Row] = []
    for recipe in RECIPES:
        job, estimate = _estimated(recipe)
        row: list[object] = [recipe.name + (f" ({recipe.note})" if recipe.note else ""), recipe.gpus]
        verdict = "fits" if estimate.fullest.total <= LIMIT else "does not fit"
        row += [f"{estimate.step_seconds:.2f}", f"{estimate.fullest.total / 1e9:.1f} GB, {verdict}"]
        for schedules in (_STOCK, catalog.NAMES):
            start = time.process_time()
            best = _search(job, recipe.gpus, schedules, True, ()).best[0]
            search_seconds = time.process_time() - start
            ratio = estimate.step_seconds / best.estimate.step_seconds
            row += [f"{ratio:.3f}", f"{_about(best)} ({search_seconds:.0f} s of search)"]
            reasons = why(best, Evaluated(best.candidate, estimate))
        rows.append((*row, reasons))
    head = ("recipe", "GPUs", "step, s", "fullest rank", "over stock's best", "which is")
    head += ("over the best of all", "which is", "and loses there")
    return table(head, rows)


def _described(values: Mapping[str, Any], seq_length: int, batch: int) -> Job:
    return describe(
        {
            **_TRAINING,
            **values,
            "seq_length": seq_length,
            "max_position_embeddings": seq_length,
            "micro_batch_size": 1,
            "global_batch_size": batch,
        }
    )


def _estimated(recipe: Recipe) -> tuple[Job, Estimate]:
    """Return the recipe's model without its sizes, and the estimate with them."""
    has_name = isinstance(recipe.model, str)
    model = described.read_model(recipe.model).values if has_name else {**_LIKE_LLAMA, **recipe.model}
    plain, full = (
        _described({**model, **sizes, "tp_comm_overlap": True}, recipe.seq_length, recipe.global_batch_size)
        for sizes in ({}, recipe.sizes)
    )
    return plain, estimate_request(full, MACHINE, for_world(asked_of(full), recipe.gpus))


def _search(
    job: Job, gpus: int, schedules: Sequence[str], is_uneven: bool, fixed: Sequence[str]
) -> SearchResult:
    names = permitted(asked_of(job), schedules if schedules == _STOCK else [*schedules, FLEX])
    families = [name for name in names if name != FLEX]
    space = Space(
        job, gpus, MACHINE.gpus_per_node, job.batch.global_batch_size or 0, families, fixed, is_uneven
    )
    compiles = Compiles.TOO if FLEX in names else Compiles.NEVER
    return Search(space, MACHINE, LIMIT, compiles=compiles).run()


def _about(result: Evaluated) -> str:
    layout = (result.candidate.layout or "").replace("|", r"\|")  # as a cell of a table spells it
    return result.candidate.name + (f" `{layout}`" if layout else "")


def main(out: Out = RESULTS / "layouts.md") -> None:
    """Write the page."""
    about = "Everything is simulated, with the planner's model of a step."
    parts = {"Models whose layers differ": heterogeneous_models, "Recommended configurations": recipes}
    publish(out, "Layouts", about, *sections(parts))


if __name__ == "__main__":
    typer.run(main)
