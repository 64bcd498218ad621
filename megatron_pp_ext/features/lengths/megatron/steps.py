"""What an order of microbatches brings to the steps of a model, and what it would bring."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch.distributed as dist

from megatron_pp_ext.features.lengths.megatron.ordered_data import REPLAYS, Ordered
from megatron_pp_ext.features.lengths.megatron.run_costs import RunCosts
from megatron_pp_ext.features.lengths.megatron.within_limit import WithinLimit
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.ordering import FLAG, Ordering
from megatron_pp_ext.features.lengths.orders import by_rule
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.message_groups import sizes_of
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.runtime.first_rank import print_rank_0
from megatron_pp_ext.schedule.simulate import simulate

LEAST_GAIN = 0.005
"""The part of a step from which its gain is worth a number."""

MOST_ACTIONS = 20_000
"""The actions of the largest step that is simulated for a line: three orders of it take a second."""


def ordered(pipeline: Pipeline) -> StepPart:
    """Return what orders the data of steps, as the request asks, unless another feature does."""
    request = pipeline.request
    ordering = request.option(Ordering)
    if any(option.orders_lengths for option in request.options) or (ordering and ordering.how == "given"):
        return lambda step: nullcontext()
    if ordering is None:
        return Unordered(pipeline).step
    make = WithinLimit if request.is_compiled else Ordered
    return make(pipeline, ordering).step


class Unordered:
    """Leaves the data of ``pipeline`` as it is, and logs once what the order by rule would bring.

    Lengths are those that messages have announced, so that no batch is looked into: where all messages have
    one shape nothing is logged, whatever documents they hold.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_logged = False

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Surround a step; only the first rank of the job looks at it, once it has run."""
        yield
        if self._is_logged or step.inputs.forward_only or dist.get_rank() > 0:
            return
        announced = step.inputs.announced or {}
        if len(announced) == step.inputs.microbatches and self._may_order(step):
            # A stage may hand on fewer tokens than it got; the most cost most.
            sizes = sizes_of(step.inputs, (max(announced[number]) for number in range(len(announced))))
            if len(set(sizes)) > 1:
                self._is_logged = True
                with suppress(ValueError):  # any model may train, also one that the estimate does not know
                    self._log(step, Microbatches.of([tokens] * rows for rows, tokens in sizes))

    def _may_order(self, step: Step) -> bool:
        """Return whether an order is possible (``lengths.rules``), and simulated in no time."""
        request, config = self._pipeline.request, step.inputs.config
        if request.is_compiled and (request.options or config.expert_model_parallel_size > 1):
            return False
        is_small = sum(map(len, step.schedule.orders)) <= MOST_ACTIONS
        return is_small and not any(getattr(config, name, False) for name in REPLAYS)

    def _log(self, step: Step, microbatches: Microbatches) -> None:
        run_costs = RunCosts(self._pipeline, Ordering("rule"))
        costs = run_costs.of(microbatches)
        orders = by_rule(run_costs.work(microbatches), step.placement)
        as_given = simulate(step.schedule, costs).makespan
        shortest = min(simulate(step.schedule, costs.ordered(order)).makespan for order in orders)
        gain = 1 - shortest / as_given
        request = "order='rule'" if self._pipeline.is_per_model else f"{FLAG} rule"
        print_rank_0(
            f"megatron_pp_ext: microbatches of {min(microbatches.tokens):,} to {max(microbatches.tokens):,} "
            f"tokens run in the order of the data; with {request} this step would have taken "
            f"{f'{gain:.0%}' if gain >= LEAST_GAIN else 'no'} less time by simulation (docs/lengths.md says "
            "what an order asks of a loop)"
        )
