"""The exchange of tokens by a dispatcher that sends a token to each rank once, whatever experts it has there.

DeepEP, for one, sends a token into each node once, over the network, and from there to the ranks of the node
(https://github.com/deepseek-ai/DeepEP, legacy documentation).
"""

from megatron_pp_ext.costs.system import System

_START = 3.7e-5
"""What such a kernel takes to start and to tell all ranks how many tokens come, in seconds: fitted, like
``_OWN``, to one half of DeepEP's dispatches and combinations on 8 H100 (ai-dynamo/aiconfigurator, commit
095f58a51, comm/sglang 0.5.12)."""

_OWN = 1.6
"""The way of a token out of its own rank or back into it, as a part of the way to another."""


def sent_once_seconds(system: System, size: float, chosen: int, ranks: int, stride: int) -> float:
    """Return the seconds in which every rank sends its ``size`` bytes of tokens, or gets them back.

    Each token goes to the ranks that have one of its ``chosen`` experts, which are spread evenly over
    ``ranks`` that are ``stride`` apart.  Links within nodes and between them work at the same time.
    """
    if ranks < 2 or size <= 0:
        return 0.0
    near = system.in_a_node(ranks, stride)
    nodes = ranks / near
    inside = size * (_reached(chosen, ranks) * (1 - 1 / near) + _OWN) / system.node.bytes_per_second
    between = size * _reached(chosen, nodes) * (1 - 1 / nodes) / system.between_nodes.bytes_per_second
    return _START + max(inside, between)


def _reached(chosen: int, places: float) -> float:
    """Return how many of ``places`` a token's ``chosen`` experts are at."""
    return places * (1 - (1 - 1 / places) ** chosen)
