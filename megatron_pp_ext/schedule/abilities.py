"""Abilities of a schedule.  All other code asks for these (``catalog.abilities``), never for its name."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Abilities:
    """Properties of a schedule that its order alone does not show."""

    splits_backward: bool = False
    """Whether any backward may come in two halves, so that weight gradients must be deferrable."""
    has_pairs: bool = False
    """Whether there may be an order in which a forward and a backward run as a pair."""
    is_compiled: bool = False
    """Whether the order is searched for, by costs and within a limit of memory."""
    takes_limit: bool = False
    """Whether whoever asks for the schedule sets that limit."""
    measures_memory: bool = False
    """Whether the memory that the devices have free is that limit, which only training can measure."""
    flushes: bool = True
    """Whether a step leaves no microbatch in flight; else a stage updates as its own backwards come in."""
    has_two_versions: bool = False
    """Whether a stage that does not flush keeps two versions of its weights at most."""
    order: str | None = None
    """The catalogue's schedule whose order this one repeats without end, where it does not flush."""
    file: Path | None = None
    """The file that the schedule is read from."""
