"""Draws loops with microbatches of unlike length, and compares each with Megatron's own schedule.

    python -m tests.hunt.lengths --cases 25 --seed 1
    python -m tests.hunt.lengths --seed 1 --case 17        # one of them again

The exit status is 1 if one differs.
"""

# What the tests set before they import torch.
import tests.conftest  # noqa: F401

# isort: split
import typer

from tests.hunt.lengths.jobs import drawn, problem
from tests.hunt.options import Budget, Case, Cases, Seed, chosen


def main(cases: Cases = 25, seed: Seed = 1, case: Case = None, budget: Budget = float("inf")) -> None:
    """Draw, run and compare."""
    differ = False
    for number in chosen(cases, case, budget):
        job = drawn(seed, number)
        found = problem(job)
        print(f"case {number}: {f'DIFFERS, {job}: {found}' if found else 'equal'}", flush=True)
        differ = differ or bool(found)
    raise typer.Exit(int(differ))


if __name__ == "__main__":
    typer.run(main)
