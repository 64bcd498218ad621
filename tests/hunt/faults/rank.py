"""One rank of a job, forked from the hunt or started by torchrun: ``-m tests.hunt.faults.rank FILE``."""

import multiprocessing.util
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pp_ext.launch import install
from tests.support import training  # has to come before Megatron
from tests.support.samples import note_samples

# isort: split
from megatron.training import arguments

from megatron_pp_ext.features.offload import megatron
from tests.hunt.faults.strike import Strike, count_calls

install()

PATIENCE = 30.0
"""Seconds that ranks wait for each other; the flag has whole minutes."""


@dataclass(frozen=True)
class Orders:
    """What the ranks of a job have to do, and where they note their samples."""

    argv: list[str]
    samples: Path
    victim: int | None = None
    strike: Strike | None = None


def be_rank(rank: int, orders: Orders) -> dict[str, Any]:
    """Train; return the losses, those of evaluations, and how many calls each moment has."""
    note_samples(orders.samples / str(rank))
    megatron.SMALLEST = 1  # storages of a tiny model move, too
    if orders.strike:
        _wait_for_seconds_only()
    calls = count_calls(orders.strike if rank == orders.victim else None)
    try:
        run = training._train(rank, orders.argv, training.initialize_by_layer, None)
    finally:
        multiprocessing.util._exit_function()  # a process that ends by itself ends what it started
    return {"losses": run.losses, "validation": run.validation, "calls": calls}


def _wait_for_seconds_only() -> None:
    parse_args = arguments.parse_args

    def patient(*args: Any, **kwargs: Any) -> Any:
        parsed = parse_args(*args, **kwargs)
        parsed.distributed_timeout_minutes = PATIENCE / 60
        return parsed

    arguments.parse_args = patient


if __name__ == "__main__":
    be_rank(int(os.environ["RANK"]), pickle.loads(Path(sys.argv[1]).read_bytes()))
