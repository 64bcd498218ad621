"""Writes the numbers of many schedules, estimates and searches, and compares two such files.

    python -m tests.hunt.same_numbers write before.json      # in one checkout
    python -m tests.hunt.same_numbers write after.json       # in another one
    python -m tests.hunt.same_numbers compare before.json after.json

Every case is a command of ``mpp`` with ``--json``, run in this process, so that the script goes on working
when what is behind the commands is rebuilt.  A refusal counts as a result too: its line is compared.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

FAMILIES = (
    "gpipe", "1f1b", "interleaved", "breadth-first", "1f1b-v", "zb-h1", "zb-h2", "interleaved-zb", "v-min",
    "v-half", "v-zb", "dualpipe-v",
)  # fmt: skip
UNEVEN = "--f 1.3 --i 1.7 --w 0.9 --hop 0.15 --output-layer 0.4"
PAIRED = "--pair-time 0.8 --f 1.3 --i 1.7 --w 0.9 --hop 0.15"
MODELS = ("llama3-8b", "qwen3-32b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")

_CHANGES = (
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective",
    "--context-parallel-size 2",
    "--pipeline-schedule pipedream --pipeline-update-interval 16",
    "--pipeline-schedule pipedream-2bw",
    "--pipeline-schedule v-half --pipeline-vocabulary shared",
    "--pipeline-schedule flex --pipeline-memory-limit 0.6",
    "--decoder-first-pipeline-num-layers 8",
    "--pipeline-model-parallel-layout Et*7|t*9|t*8|t*8L --pipeline-schedule zb-h1",
    "--no-such-flag",
)


def schedules() -> Iterator[str]:
    """Every family for 2 to 9 ranks and 1 to 40 microbatches, and some with uneven times."""
    for name, ranks, microbatches in product(FAMILIES, range(2, 10), range(1, 41)):
        yield f"schedule {name} -p {ranks} -m {microbatches}"
    for name, ranks, microbatches in product(FAMILIES, (2, 3, 4, 8), (1, 3, 8, 17, 32)):
        size = f"schedule {name} -p {ranks} -m {microbatches}"
        yield f"{size} {UNEVEN}"
        yield f"{size} {UNEVEN} --shared-vocabulary"
        yield f"{size} {PAIRED}"
    for name, chunks in product(("interleaved", "breadth-first", "interleaved-zb"), (3, 4)):
        yield f"schedule {name} -p 4 -m 8 --chunks {chunks}"


def compiled() -> Iterator[str]:
    """Thirty compiled schedules: memory limits of all kinds, with even, uneven and paired times."""
    for (ranks, microbatches), limit in product(
        ((2, 5), (3, 9), (4, 8), (5, 12), (8, 16)), ("0.4", "0.6", "1")
    ):
        yield f"schedule flex -p {ranks} -m {microbatches} --memory-limit {limit}"
    for (ranks, microbatches), limit in product(((3, 7), (4, 12), (6, 10)), ("0.5", "0.75", "9")):
        yield f"schedule flex -p {ranks} -m {microbatches} --memory-limit {limit} {UNEVEN}"
    for (ranks, microbatches), limit in product(((3, 8), (4, 9)), ("0.67", "0.8", "1")):
        yield f"schedule flex -p {ranks} -m {microbatches} --memory-limit {limit} {PAIRED}"


def estimates() -> Iterator[str]:
    """Fifty jobs: models, machines, schedules, and the flags that change what a step takes."""
    batch = "--micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16"
    for model, name in product(MODELS, ("1f1b", "zb-h1", "v-half", "interleaved", "dualpipe-v")):
        experts = " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1" * (model in MODELS[3:])
        chunks = " --num-layers-per-virtual-pipeline-stage 2" * (name == "interleaved")
        yield (
            f"estimate --model {model} -- --pipeline-model-parallel-size 4 --pipeline-schedule {name} "
            f"{batch} --tensor-model-parallel-size 2 --sequence-parallel{experts}{chunks}"
        )
    for system, name in product(("a100-80g", "h200", "b200", "mi300x"), ("1f1b", "v-min", "v-zb")):
        yield (
            f"estimate --system {system} --model llama3-8b -- --pipeline-model-parallel-size 4 "
            f"--pipeline-schedule {name} {batch}"
        )
    sizes = "--pipeline-model-parallel-size 8 --tensor-model-parallel-size 8"
    yield f"estimate --model gpt3-175b -- {sizes} {batch}"
    one = f"estimate --model llama3-8b --world-size 16 -- --pipeline-model-parallel-size 4 {batch}"
    for flags in _CHANGES:
        yield f"{one} {flags}"


def searches() -> Iterator[str]:
    """Six searches."""
    for asked in (
        "llama3-8b --gpus 8 --global-batch-size 64 --seq-length 4096",
        "llama3-8b --gpus 16 --global-batch-size 64 --seq-length 8192 --layout even",
        "qwen3-30b-a3b --gpus 16 --global-batch-size 64 --seq-length 4096 --schedules 1f1b,zb-h1,v-half",
        "mixtral-8x7b --gpus 16 --global-batch-size 32 --seq-length 4096 --system h200",
        "qwen3-8b --gpus 8 --global-batch-size 32 --seq-length 4096 --schedules flex,1f1b,v-zb --memory 40e9",
    ):
        yield f"search --model {asked} -- --bf16"
    yield (
        "search --model llama3-70b --gpus 64 --global-batch-size 128 --seq-length 8192 --top 3 -- --bf16 "
        "--tensor-model-parallel-size 8 --sequence-parallel"
    )


def result(line: str, folder: Path) -> Any:
    """The JSON that ``mpp line`` writes, or the last lines of its refusal."""
    from megatron_pp_ext.cli import app as mpp

    file = folder / "numbers.json"
    file.unlink(missing_ok=True)
    own, *behind = line.split(" -- ")
    words = [*own.split(), "--json", str(file), *(["--", *behind[0].split()] if behind else [])]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            mpp(words, standalone_mode=True)
        except SystemExit as end:
            code = end.code
    if file.exists():
        # Pages of a search name the command, with this folder in it, and the minute at which it ran.
        numbers = json.loads(file.read_text())
        return {key: value for key, value in numbers.items() if key not in ("command", "date")}
    return {"exit": code, "told": " ".join(told.getvalue().split()).rpartition("mpp: ")[2]}


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The places at which two results differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{at}]")
    elif old != new:
        yield f"{where.lstrip('.')}: {old!r} became {new!r}"


@app.command()
def write(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    only: Annotated[
        str, typer.Option(help="Kinds with commas between.")
    ] = "schedules,compiled,estimates,searches",
    part: Annotated[int, typer.Option(help="Every so manyth case of schedules alone.")] = 1,
) -> None:
    """Run all cases of this checkout and write their results."""
    kinds = {"schedules": schedules, "compiled": compiled, "estimates": estimates, "searches": searches}
    lines = [
        line
        for kind in only.split(",")
        for line in list(kinds[kind]())[:: part if kind == "schedules" else 1]
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEGATRON_PP_EXT_CACHE"] = (
            folder  # else schedules come from where the other checkout put them
        )
        results = {line: result(line, Path(folder)) for line in track(lines, console=None)}
    file.write_text(json.dumps(results, indent=0, sort_keys=True))
    refused = sum("told" in one for one in results.values())
    print(f"{len(results)} results, {refused} of them refusals")


@app.command()
def compare(old: Path, new: Path) -> None:
    """Compare two files by what both have; the exit status is 1 where they differ."""
    before, after = (json.loads(file.read_text()) for file in (old, new))
    common = [line for line in before if line in after]
    different = 0
    for line in common:
        found = list(differences(before[line], after[line]))
        if found:
            different += 1
            print(f"mpp {line}", *found[:8], sep="\n    ")
    print(f"{len(common)} cases, {different} of them different")
    sys.exit(different > 0 or not common)


if __name__ == "__main__":
    app()
