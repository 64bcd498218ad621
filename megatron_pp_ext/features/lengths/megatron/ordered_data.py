"""Training steps whose microbatches are read ahead and run in a planned order.

The schedule stays as it is: what its microbatch k reads is microbatch ``order[k]`` of the data, on every
stage, and the losses are handed over in the order of the data.  Evaluations are left alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch.distributed as dist

from megatron_pp_ext.features.lengths.length_costs import LengthCosts
from megatron_pp_ext.features.lengths.microbatches import Microbatches
from megatron_pp_ext.features.lengths.ordering import Ordering
from megatron_pp_ext.features.lengths.plan import Planner
from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.schedule.costs import Costs

type _Documents = tuple[tuple[int, ...], ...]
"""The document lengths of each microbatch."""


def ordered(pipeline: Pipeline) -> StepPart:
    """Return what orders the data of steps, as the request asks."""
    ordering = pipeline.request.option(Ordering)
    placement = pipeline.placement
    planners: dict[int, Planner] = {}

    def planner(microbatches: int) -> Planner:
        if microbatches not in planners:
            assert pipeline.source is not None
            planners[microbatches] = Planner(pipeline.source.schedule(microbatches), moves_weights=False)
        return planners[microbatches]

    @contextmanager
    def during(step: Step) -> Iterator[None]:
        inputs = step.inputs
        if ordering is None or ordering.how == "given" or inputs.forward_only:
            yield
            return
        costs = LengthCosts.with_attention(
            Costs.per_rank(placement.ranks, placement.chunks), 1, ordering.equal_at
        )
        read = [_read(iterator, inputs.microbatches) for iterator in inputs.iterators]
        own = next((_documents(batches, ordering) for batches in read if batches is not None), None)
        microbatches = Microbatches(_agreed(own, inputs, costs))
        order = planner(inputs.microbatches).plan(costs.of(microbatches), ordering.how).order
        inputs.iterators = [
            None if batches is None else iter([batches[number] for number in order]) for batches in read
        ]
        yield
        if inputs.losses:
            by_number = dict(zip(order, inputs.losses, strict=True))
            inputs.losses[:] = [by_number[number] for number in range(len(order))]

    return during


def _read(iterator: Any, count: int) -> list[Any] | None:
    """Return the next ``count`` microbatches, or None on a rank that is given no data.

    RuntimeError where the data ends before.
    """
    if iterator is None:
        return None
    batches = list(islice(iterator, count))
    if len(batches) < count:
        raise RuntimeError(
            f"the data iterator ended after {len(batches)} of the {count} microbatches of this step; give it "
            "more data, or fewer microbatches to the step"
        )
    return batches


def _documents(batches: Sequence[Any], ordering: Ordering) -> _Documents:
    return tuple(tuple(map(int, ordering.lengths_of(batch))) for batch in batches)


def _agreed(own: _Documents | None, inputs: StepInputs, costs: LengthCosts) -> _Documents:
    """Return the lengths by which all ranks that meet in the step plan it; collective over their groups.

    The ranks of a pipeline have the same ones, and ranks without data take those of others.  Pipelines that
    share experts have data of their own: they plan by the heaviest microbatch in each place.  RuntimeError,
    on all ranks of the pipeline, where these have different lengths, and where none has data.
    """
    if (tensor_ranks := getattr(inputs.groups, "tp", None)) is not None and tensor_ranks.size() > 1:
        own = next((one for one in _gathered(own, tensor_ranks) if one is not None), None)
    gathered = _gathered(own, inputs.group)
    known = {found: rank for rank, found in reversed(list(enumerate(gathered))) if found is not None}
    if not known:
        raise RuntimeError(
            "no rank of this pipeline has a data iterator, and an order of microbatches is planned by their "
            "lengths; leave the order out"
        )
    if len(known) > 1:
        one, other, *_ = sorted(known.values())
        raise RuntimeError(
            f"pipeline ranks {one} and {other} read microbatches of different lengths in this step; give all "
            "ranks of a pipeline the same data, or leave the order out"
        )
    (found,) = known
    experts = getattr(inputs.groups, "ep", None)
    if experts is None or experts.size() == 1:
        return found
    for group in (experts, inputs.group):
        found = _heaviest(_gathered(found, group), costs)
    return found


def _heaviest(some: Sequence[_Documents], costs: LengthCosts) -> _Documents:
    """Return the heaviest microbatch in each place."""
    work = [costs.work(Microbatches(documents)) for documents in some]
    best = (max(range(len(some)), key=lambda at: work[at][place]) for place in range(len(some[0])))
    return tuple(some[at][place] for place, at in enumerate(best))


def _gathered(own: Any, group: Any) -> list[Any]:
    gathered = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return gathered
