"""Training jobs in the documents that no test machine can run pass Megatron's own parser and validation."""

import pytest

from tests.support.documents import command_blocks, launched
from tests.support.flags import validated

JOBS = [
    pytest.param(*job, id=f"{block}:{number}")
    for block in command_blocks()
    if block.reason in ("needs GPUs", "needs SLURM", "needs a checkout")
    for number, job in enumerate(filter(None, map(launched, block.commands())))
]


@pytest.mark.parametrize(("ranks", "flags"), JOBS)
def test_the_flags_are_valid(ranks: int, flags: list[str]) -> None:
    args, request = validated(flags, ranks)
    assert args.world_size == ranks
    assert request and request.schedule == args.pipeline_schedule


def test_there_are_jobs() -> None:
    assert JOBS
