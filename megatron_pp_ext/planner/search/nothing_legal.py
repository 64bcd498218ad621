"""Why a search has nothing to try: the flag that leaves no combination, with the values that work."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.step.model_description import flag

_NEIGHBOURS = 64
"""The number of nodes, fewer and more, among which a number of GPUs that works is looked for."""

_FIELDS = {
    "tensor_model_parallel_size": "tensor",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
    "pipeline_model_parallel_size": "pipeline",
    "num_virtual_stages_per_pipeline_rank": "chunks",
    "micro_batch_size": "micro_batch",
}
"""The arguments that may rule everything out, and where candidates have them."""


def reason(space: Space) -> str:
    """Return the error for a ``space`` without any candidate.

    It names the flags of the user that are impossible even by themselves, or else those of which any one
    has to change, or else the nearest numbers of GPUs that work.
    """
    names = [name for name in _FIELDS if name in space.fixed]
    for name in names if _works(_without(space, names)) else ():
        alone = _without(space, [other for other in names if other != name])
        if not _works(alone):
            return _to_change(space, [name], alone)
    together = [name for name in names if _works(_without(space, [name]))]
    if together:
        return _to_change(space, together, space)
    return _other_gpus(space)


def _to_change(space: Space, names: Iterable[str], wider: Space) -> str:
    """Return the sentence that one of the flags ``names`` has to change, and to what, given ``wider``."""
    flags, ways = [], []
    for name in names:
        sizes = {
            getattr(candidate, _FIELDS[name]) or candidate.tensor
            for candidate in _without(wider, [name]).sized()
        }
        values = sorted(map(int, sizes))
        flags.append(f"{flag(name)} {space.job.value(name)}")
        ways.append(f"{flag(name)} to {_listed(values)}")
    return (
        f"nothing is legal on {space.gpus} GPUs with {' and '.join(flags)} and --global-batch-size "
        f"{space.batch}: set {', or '.join(ways)}"
    )


def _listed(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _other_gpus(space: Space) -> str:
    distances = range(1, _NEIGHBOURS * space.gpus_per_node)
    below = next((space.gpus - d for d in distances if d < space.gpus and _on(space, space.gpus - d)), None)
    above = next((space.gpus + d for d in distances if _on(space, space.gpus + d)), None)
    nearest = " and ".join(str(number) for number in (below, above) if number)
    return (
        f"no combination of parallel sizes divides --gpus {space.gpus} and --global-batch-size "
        f"{space.batch} for this model" + (f": nearest that work are {nearest}" if nearest else "")
    )


def _on(space: Space, gpus: int) -> bool:
    """Whether ``space`` has a candidate on so many GPUs, which fill their nodes."""
    fills_nodes = gpus <= space.gpus_per_node or gpus % space.gpus_per_node == 0
    return fills_nodes and _works(replace(space, gpus=gpus))


def _without(space: Space, names: Iterable[str]) -> Space:
    """Return ``space`` with the arguments ``names`` left to the search."""
    return replace(space, fixed=frozenset(space.fixed) - frozenset(names))


def _works(space: Space) -> bool:
    return any(True for _ in space.sized())
