"""Draws random jobs and compares each with stock Megatron.

    make fuzz N=50 SEED=1
    make fuzz SEED=1 CASE=17          # one of them again
    python -m tests.hunt.fuzz --cases 500 --report benchmarks/results/fuzz.md
    TRANSFORMER_ENGINE=CHECKOUT make fuzz N=40    # its layers in CUDA graphs, on a stub of capture

A difference is shrunk to the least that shows it.  The exit status is 1 if there is one.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

# What has to be set before torch is imported, and the stand-ins for torch.cuda.
import tests.conftest
import tests.support.ranks  # noqa: F401

# isort: split
from tests.support.engine_checkout import install_named

# isort: split
HAS_GRAPHS = install_named()

import typer  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402

from benchmarks.report import publish  # noqa: E402
from megatron_pp_ext.cpu import flags  # noqa: E402
from megatron_pp_ext.launch import install  # noqa: E402
from tests.hunt.fuzz.draw import draw  # noqa: E402
from tests.hunt.fuzz.report import Found, sections, told  # noqa: E402
from tests.hunt.fuzz.shrink import shrunk  # noqa: E402
from tests.hunt.fuzz.trial import Trials  # noqa: E402
from tests.hunt.options import Budget, Case, Cases, Report, Seed, chosen  # noqa: E402
from tests.support import graph_stub  # noqa: E402
from tests.support.few_trials import few_trials  # noqa: E402

FUSION = "--no-gradient-accumulation-fusion"
"""Transformer Engine's stand-in has a kernel for it."""


def main(
    cases: Cases = 50,
    seed: Seed = 1,
    case: Case = None,
    budget: Budget = float("inf"),
    report: Report = None,
    shrink: Annotated[bool, typer.Option(help="Look for the least that shows a difference.")] = True,
) -> None:
    """Draw, run, compare, shrink and report."""
    install()
    if HAS_GRAPHS:
        flags.CPU_FLAGS = tuple(flag for flag in flags.CPU_FLAGS if flag[0] != FUSION)
        graph_stub.permit_local_graphs(cuda_graphs, setattr)
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, few_trials(os.path.join(folder, "compiled")):
        trials = Trials(Path(folder))
        for number in chosen(cases, case, budget):
            row = draw(seed, number)
            outcome = trials(row)
            print(f"case {number}: {outcome.kind}, {outcome.seconds:.1f} s", flush=True)
            least = None
            if outcome.kind.is_finding and shrink:
                least = shrunk(row, lambda plainer, of=outcome: trials(plainer).is_like(of))
            found.append(Found(number, row, outcome, least))
            if outcome.kind.is_finding:
                print(told(seed, found[-1]), flush=True)
    if report is not None:
        about = "Each case is a job drawn at random, trained under a schedule and under stock's 1F1B."
        publish(report, "Random jobs against stock Megatron", about, *sections(seed, found))
    findings = sum(one.outcome.kind.is_finding for one in found)
    print(f"{len(found)} cases of seed {seed}, {findings} to look at")
    raise typer.Exit(1 if findings else 0)


if __name__ == "__main__":
    typer.run(main)
