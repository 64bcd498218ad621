"""Hits ranks of random jobs with signals, and resumes what is left.

    make faults N=20 SEED=1
    make faults SEED=1 CASE=17        # one of them again
    python -m tests.hunt.faults --cases 60 --report benchmarks/results/faults.md

The exit status is 1 if a case went wrong.
"""

import itertools
import warnings

# What the tests set before they import torch.
import tests.conftest  # noqa: F401

# isort: split
import typer

from tests.hunt.faults.cases import drawn
from tests.hunt.faults.report import line_of, write
from tests.hunt.faults.trial import try_case
from tests.hunt.options import Budget, Case, Cases, Report, Seed, chosen


def main(
    cases: Cases = 20, seed: Seed = 1, case: Case = None, budget: Budget = float("inf"), report: Report = None
) -> None:
    """Try the cases, and print a line for each."""
    warnings.simplefilter("ignore")
    outcomes = []
    for number in chosen(cases, case, budget):
        outcomes.append(try_case(next(itertools.islice(drawn(seed), number, None))))
        print(f"{number}: {line_of(outcomes[-1])}", flush=True)
        if report:
            write(outcomes, report)
    if any(outcome.problems for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
