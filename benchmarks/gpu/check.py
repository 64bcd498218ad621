"""What needs a GPU, in parts, each of which ends within its seconds and leaves a table.

    python -m benchmarks.gpu.check [--out FOLDER] [--dry] [--seconds N] [PART[:ROW,ROW...] ...]

Writes FOLDER/PART.md, whole after each row, and FOLDER/logs.tar.gz with the end of every log.  A row that
fails does not stop the others, but the exit status is 1 then.  SIGTERM ends the measurement under way.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.archive import pack, unpack
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import Rows
from benchmarks.report import RESULTS
from megatron_pp_ext.jobs.failure import ended_as_by_the_keyboard

STOPPED = 128 + signal.SIGTERM
"""The exit status of a check that was stopped."""


def main(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(PARTS)}; all without any.", metavar="PART[:ROW,...]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for tables and logs.")] = RESULTS / "gpu",
    seconds: Annotated[
        float | None, typer.Option(help="What each part may take, in place of its own.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Try the script on a CPU, with tiny models.")] = False,
) -> None:
    """Run the parts one after the other, and print their tables."""
    rows_of_parts = chosen(parts or list(PARTS))
    out.mkdir(parents=True, exist_ok=True)
    archive, failed = out / "logs.tar.gz", []
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        unpack(archive, Path(folder))
        bench = Bench(Path(folder), dry)
        try:
            with ended_as_by_the_keyboard():
                machine = bench.module("machine", "benchmarks.gpu.machine")
                if not machine["cuda"]:
                    raise SystemExit("torch sees no CUDA device here: run this where one is, or add --dry")
                bench.nccl = tuple(machine["nccl"])
                for name, rows in rows_of_parts.items():
                    bench.begin(seconds or PARTS[name].seconds)
                    page = out / f"{name}.md"
                    written = partial(pack, bench.logs, archive)
                    table = Rows(page, PARTS[name].title, f"With {machine['line']}.", bench, rows, written)
                    PARTS[name].run(bench, table)
                    print(page.read_text(encoding="utf-8"), flush=True)
                    failed += [name] * table.has_failed
        except KeyboardInterrupt:
            print(f"stopped: {out} has what was measured", file=sys.stderr)
            raise SystemExit(STOPPED) from None
        except RuntimeError as error:
            raise SystemExit(f"this machine cannot be examined: {error}") from None
        finally:
            pack(bench.logs, archive)
    if failed:
        raise SystemExit(f"rows failed in {', '.join(failed)}: {archive} has the logs")


def chosen(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the parts that ``words`` name, each with its chosen rows, of which there are none for all."""
    rows_of_parts = {}
    for word in words:
        name, _, rows = word.partition(":")
        if name not in PARTS:
            raise SystemExit(f"there is no part '{name}': take {', '.join(PARTS)}")
        rows_of_parts[name] = tuple(filter(None, rows.split(",")))
        names = PARTS[name].rows
        if unknown := [row for row in rows_of_parts[name] if row not in names]:
            rows_of = f"take {', '.join(names)}" if names else "its rows cannot be chosen"
            raise SystemExit(f"{name} has no row '{unknown[0]}': {rows_of}")
    return rows_of_parts


if __name__ == "__main__":
    typer.run(main)
