"""The exchange of tokens by a dispatcher that sends a token to each rank once, whatever experts it has there.

DeepEP, for one, sends a token into each node once, over the network, and from there to the ranks of the node
(https://github.com/deepseek-ai/DeepEP, legacy documentation).
"""

from dataclasses import dataclass

from megatron_pp_ext.costs.system import System

_START = 3.7e-5
"""The seconds in which such a kernel starts and sends all ranks the number of tokens: fitted, like
``_OWN``, to one half of DeepEP's dispatches and combinations on 8 H100 (ai-dynamo/aiconfigurator, commit
095f58a51, comm/sglang 0.5.12)."""

_OWN = 1.6
"""The way of a token out of its own rank or back into it, as a part of the way to another."""


_LAYOUT = {"deepep": 1e-4}
"""What an exchange takes besides, by the dispatcher: DeepEP first counts the tokens of each rank, and its
host waits for them.  It is half of what layers of experts on 8 H100 take longer with it than with HybridEP,
in bf16 (NVIDIA/Megatron-LM, commit 32f2c9cfd, tests/functional_tests/test_cases/common/moe_perf)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token finds its ``chosen`` experts, of ``limit`` of all ``groups`` of them, or of any if 0."""

    chosen: int
    groups: int = 0
    limit: int = 0

    def reached(self, places: float) -> float:
        """Return how many of ``places``, over which experts are spread in order, a token's experts are at."""
        if not self.groups or not 0 < self.limit < self.groups:
            return _reached(self.chosen, places)
        if places < self.groups:
            return _reached(self.limit, places)
        return self.limit * _reached(self.chosen / self.limit, places / self.groups)


def sent_once_seconds(
    system: System, size: float, routing: Routing, ranks: int, stride: int, backend: str = ""
) -> float:
    """Return the seconds in which every rank sends its ``size`` bytes of tokens, or gets them back.

    Each token goes to the ranks that have one of its experts, which are spread evenly over ``ranks`` that are
    ``stride`` apart.  Links within nodes and between them work at the same time.  ``backend`` is the
    dispatcher's, whose host's time counts; none for its kernels alone.
    """
    if ranks < 2 or size <= 0:
        return 0.0
    near = system.in_a_node(ranks, stride)
    nodes = ranks / near
    inside = size * (routing.reached(ranks) * (1 - 1 / near) + _OWN) / system.node.bytes_per_second
    between = size * routing.reached(nodes) * (1 - 1 / nodes) / system.between_nodes.bytes_per_second
    return _START + _LAYOUT.get(backend, 0.0) + max(inside, between)


def _reached(top_k: float, places: float) -> float:
    """Return how many of ``places`` have one of ``top_k`` experts that are chosen at random."""
    return places * (1 - (1 - 1 / places) ** top_k)
