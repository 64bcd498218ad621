"""Lines that a job logs once."""

import torch.distributed as dist


def print_rank_0(line: str) -> None:
    """Print ``line`` at once on the first rank of the job, or in a process that is no rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)
