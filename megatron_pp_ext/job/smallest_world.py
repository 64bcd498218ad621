"""The fewest ranks that a job's parallel sizes need."""

from math import gcd


def smallest_world(copy: int, pipeline: int, experts: int) -> int:
    """Return the fewest ranks that hold whole copies of a model, and whole groups of experts in each stage.

    ``copy`` are the ranks of one copy of the model, whose pipeline has ``pipeline`` stages, and ``experts``
    those that share the experts of a stage.
    """
    return copy * (experts // gcd(experts, copy // pipeline))
