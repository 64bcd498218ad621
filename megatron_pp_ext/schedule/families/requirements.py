"""What every builder asks of its arguments."""


def require_pipeline(name: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError unless there are at least 2 ranks and 1 microbatch."""
    if ranks < 2:
        raise ValueError(f"{name} got {ranks} rank(s), but a pipeline has at least 2: add ranks")
    if microbatches < 1:
        raise ValueError(f"{name} got {microbatches} microbatches, but a step has at least 1: add some")


def require_chunks(name: str, chunks: int, otherwise: str) -> None:
    """Raise ValueError unless a rank has at least 2 chunks; ``otherwise`` is the family for 1."""
    if chunks < 2:
        raise ValueError(
            f"{name} got {chunks} chunk(s) a rank, but needs 2 or more: raise chunks, or use {otherwise}"
        )
