"""The step to be expected where document lengths vary: the mean of steps drawn from a distribution."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.features.units.microbatches import Microbatches, drawn_step
from megatron_pp_ext.features.units.orders import How
from megatron_pp_ext.features.units.packing import balance
from megatron_pp_ext.features.units.plan import Planner, Template
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.costs import CostModel, Costs

DRAWS = 8
"""The steps that are drawn by default."""

_DOCUMENTS = 2
"""The shorter documents, as long as one together, by which attention's part of a stage is found."""


@dataclass(frozen=True, slots=True)
class StepsByLength:
    """The mean seconds that the pipeline takes, for each order of the microbatches.

    They are in the order of the data (``given``), by the rule of the schedule's family, or in one that was
    searched for.  The step is that of the slowest replica.  ``balanced`` are those of the searched order
    where documents are balanced over replicas, None for a single one.  ``heaviest`` is the work of a step's
    heaviest microbatch by its mean one's.
    """

    given: float
    rule: float
    search: float
    balanced: float | None
    heaviest: float
    draws: int
    seed: int


def length_costs(job: Job, system: System, request: Request) -> LengthCosts:
    """Return the costs of stages by the lengths of documents.

    Attention's part follows from the costs of one document of the sequence length and of two half as long.
    ValueError where stages have the costs of a file (--pipeline-costs).
    """
    if job.pipeline.pipeline_costs is not None:
        raise ValueError(
            "--lengths needs the model's own costs, and --pipeline-costs has those of one length: leave one "
            "out"
        )

    def costs(documents: int) -> Costs:
        length = job.model.seq_length // documents
        cut = job.changed(seq_length=length, micro_batch_size=documents)
        return Workload(cut, system, request.finest, request.data).costs

    return LengthCosts.through(costs(_DOCUMENTS), _DOCUMENTS, costs(1), job.model.seq_length)


def steps_by_length(
    job: Job, system: System, request: Request, lengths: Sequence[int], draws: int = DRAWS, seed: int = 0
) -> StepsByLength:
    """Return the steps of ``request`` to be expected for documents drawn from ``lengths``.

    Every microbatch is filled in the order in which documents come, up to the sequence length.
    """
    if job.pipeline.pipeline_offload is not None or request.updates is not None:
        raise ValueError(
            f"--lengths goes neither with --pipeline-offload nor with {request.schedule}, if that never "
            "flushes: leave one out"
        )
    by_length = length_costs(job, system, request)
    alike = by_length.of(Microbatches.of([[job.model.seq_length]])).units[0]
    mean = replace(alike, hop=by_length.hop, message=by_length.message, pair=by_length.pair)
    template = Template(make(request, CostModel.fixed(mean)).schedule)
    steps = _StepTimes(template, by_length, request)
    random, seconds, heaviest = Random(seed), list[list[float]](), list[float]()
    for _ in range(draws):
        shares = [
            drawn_step(lengths, request.microbatches, job.model.seq_length, random)
            for _ in range(request.data)
        ]
        heaviest += map(steps.heaviest, shares)
        seconds.append([steps.slowest(shares, how) for how in ("given", "rule", "search")])
        if request.data > 1:
            moved = steps.slowest(_balanced(shares, request, job.model.seq_length), "search")
            # Full microbatches leave little to move, and documents may lie better as they came.
            seconds[-1].append(min(moved, seconds[-1][-1]))
    unordered, rule, search, *balanced = (sum(column) / draws for column in zip(*seconds, strict=True))
    mean_heaviest = sum(heaviest) / len(heaviest)
    return StepsByLength(
        unordered, rule, search, balanced[0] if balanced else None, mean_heaviest, draws, seed
    )


class _StepTimes:
    """Times the steps of replicas under one schedule."""

    def __init__(self, template: Template, costs: LengthCosts, request: Request) -> None:
        self._template, self._costs, self._request = template, costs, request
        placement = template.schedule.placement
        self._planner = Planner(placement, costs.merged(placement.stages))

    def _planned(self, share: Microbatches, how: How) -> float:
        units, limits = self._planner.whole(share.documents), None
        if self._request.limit is not None:
            limits = self._request.budget(self._costs.of(share)).ranks
        return self._planner.plan(units, how, template=self._template, limits=limits).seconds

    def slowest(self, shares: Sequence[Microbatches], how: How) -> float:
        if how != "search":
            return max(self._planned(share, how) for share in shares)
        # A search never makes a step longer, so that only the slowest by the rule have to be searched.
        by_rule = sorted(
            ((self._planned(share, "rule"), at) for at, share in enumerate(shares)), reverse=True
        )
        most = 0.0
        for seconds, at in by_rule:
            if seconds <= most:
                break
            most = max(most, self._planned(shares[at], how))
        return most

    def heaviest(self, share: Microbatches) -> float:
        """Return the work of the heaviest microbatch by that of the mean one."""
        work = self._planner.table(self._planner.whole(share.documents)).work
        return float(max(work) * len(work) / sum(work))


def _balanced(shares: Sequence[Microbatches], request: Request, most_tokens: int) -> list[Microbatches]:
    """Return the same documents, balanced over replicas; as they were where they do not fit."""
    lengths = [length for share in shares for part in share.documents for length in part]
    try:
        balanced_shares = balance(lengths, request.data, request.microbatches, most_tokens=most_tokens)
    except ValueError:
        return list(shares)
    return [Microbatches.of([lengths[at] for at in part] for part in share) for share in balanced_shares]
