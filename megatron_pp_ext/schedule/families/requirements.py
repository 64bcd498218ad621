"""The sizes that no family can do without."""


def require_pipeline(name: str, ranks: int, microbatches: int) -> None:
    """Raise ValueError unless there are at least 2 ranks and 1 microbatch."""
    if ranks < 2:
        raise ValueError(f"{name} got {ranks} rank(s), but a pipeline has at least 2: add ranks")
    if microbatches < 1:
        raise ValueError(f"{name} got {microbatches} microbatches, but a step has at least 1: add some")
