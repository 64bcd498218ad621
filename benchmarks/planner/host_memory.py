"""Memory against throughput on 64 H100 by estimate: recomputation, V schedules, more TP, the host.

    python -m benchmarks.planner.host_memory

Llama 3 70B, and 16 layers of Kimi K2 with half of its experts (latent attention).  One process, no GPU; some
minutes on one core.  Writes results/host_memory.md, and the pictures of docs/offload.md.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import RESULTS, Out, Row, publish, table
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from megatron_pp_ext.view.memory_tradeoff import Point, draw_configurations

GPUS = 64
PICTURES = Path(__file__).parents[2] / "docs"
ALWAYS = "--micro-batch-size 1 --bf16 --use-distributed-optimizer --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODELS = {
    "llama3-70b": (
        "Llama 3 70B",
        "--global-batch-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8",
        "--tensor-model-parallel-size 8",
        "layernorm mlp",
    ),
    "kimi-k2": (
        "16 layers of Kimi K2 with half of its experts",
        "--global-batch-size 256 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 "
        "--expert-model-parallel-size 8 --num-layers 16 --moe-layer-freq 1 --num-experts 192",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "layernorm moe_act mla_up_proj",
    ),
}
SCHEDULES = {
    "1F1B": "1f1b",
    "1F1B, full recomputation": f"1f1b {FULL}",
    "1F1B, selective recomputation": "1f1b --recompute-granularity selective --recompute-modules {modules}",
    "1F1B, more TP": "1f1b",
    "V-Half": "v-half",
    "V-Min": "v-min",
    "flex 0.5": "flex --pipeline-memory-limit 0.5",
    "V-Half, host": "v-half --pipeline-offload auto",
    "1F1B, all that can on the host": "1f1b --pipeline-offload auto",
    "1F1B 0.5, host": "1f1b --pipeline-memory-limit 0.5 --pipeline-offload auto",
    "flex 0.25, host": "flex --pipeline-memory-limit 0.25 --pipeline-offload auto",
    "flex 0.5, host": "flex --pipeline-memory-limit 0.5 --pipeline-offload auto",
}


def estimated(model: str, name: str) -> Estimate:
    """Return the estimate of ``model`` under the configuration ``name``."""
    _, flags, more, modules = MODELS[model]
    schedule = SCHEDULES[name].format(modules=modules)
    words = f"{ALWAYS} {flags} {more if 'more TP' in name else ''} --pipeline-schedule {schedule}"
    asked = described.read(words.split(), model).counted()
    return estimate_request(asked, system.read("h100"), for_world(asked, GPUS))


def undominated(points: list[Point]) -> list[Point]:
    """Return the points that no other beats in memory and throughput, by rising memory."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, -point.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best


def main(
    out: Out = RESULTS / "host_memory.md",
    pictures: Annotated[Path, typer.Option(help="The folder of the pictures.")] = PICTURES,
) -> None:
    """Estimate, draw and write the tables."""
    pages = []
    for model, (title, flags, *_) in MODELS.items():
        rows, points = list[Row](), list[Point]()
        for name in SCHEDULES:
            estimate = estimated(model, name)
            memory, host = estimate.fullest.total, max(estimate.host_bytes, default=0.0)
            row = f"{memory / 1e9:.1f}", f"{estimate.step_seconds:.2f}", f"{host / 1e9:.1f}"
            rows.append((name, *row, f"{estimate.bubble:.1%}", estimate.mfu))
            points.append(Point(name, memory, estimate.tokens_per_second))
            print(*rows[-1], flush=True)
        path, limit = pictures / f"offload-{model}.png", system.read("h100").memory_bytes
        draw_configurations(points, undominated(points), limit, path, f"{title}, {GPUS} H100")
        head = "configuration", "GB of the fullest rank", "step, s", "GB on the host", "bubble", "MFU"
        pages += [f"## {title}", f"`{flags}`", table(head, rows)]
    publish(out, "The host's memory beside other ways to save some", f"Estimates, {GPUS} H100.", *pages)


if __name__ == "__main__":
    typer.run(main)
