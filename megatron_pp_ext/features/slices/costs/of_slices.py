"""The costs of equal slices of a model's sequences.

A slice costs what a microbatch of its length would, whose smaller products have a lower rate, and attention
to the slices before it on top.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import UnitName
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.unit_costs import UnitCosts

CostsOf = Callable[[Job], Costs]
"""Returns the costs of the stages for a microbatch of a job, which differs from others in its batch alone."""


def cut(job: Job, length: int, documents: int = 1) -> Job:
    """Return ``job`` with sequences of this ``length``, and so many times as many in a microbatch."""
    return job.changed(seq_length=length, micro_batch_size=documents * job.batch.micro_batch_size)


def of_slices(costs_of: CostsOf, job: Job, slices: int, names: Sequence[UnitName]) -> UnitCosts:
    """Return the costs of units with these ``names``: equal ``slices`` of the sequences of ``job``."""
    length = job.model.seq_length // slices
    alone, attention = costs_of(cut(job, length)), _attention(costs_of, job)
    squares = job.batch.micro_batch_size * length**2
    kinds = [
        Costs(
            tuple(
                _with_prefix(stage, 2 * number * squares, *seconds)
                for stage, seconds in zip(alone.stages, attention, strict=True)
            ),
            head=alone.head,
        )
        for number in range(slices)
    ]
    tokens = job.batch.micro_batch_size * length
    return UnitCosts(
        kinds[slices // 2].stages,
        alone.hop,
        alone.message,
        alone.head,
        alone.pair,
        units=tuple(kinds[name.slice] for name in names),
        tokens=(tokens,) * len(names),
    )


def _attention(costs_of: CostsOf, job: Job) -> list[tuple[float, float]]:
    """Return the seconds of F and I of each stage for a squared token of attention."""
    length = job.model.seq_length
    squares = job.batch.micro_batch_size * (length**2 - 2 * (length // 2) ** 2)
    stages, halves = costs_of(cut(job, length)).stages, costs_of(cut(job, length // 2, 2)).stages
    return [
        (
            max(0.0, whole.forward - half.forward) / squares,
            max(0.0, whole.input_gradient - half.input_gradient) / squares,
        )
        for whole, half in zip(stages, halves, strict=True)
    ]


def _with_prefix(stage: StageCosts, squares: float, forward: float, input_gradient: float) -> StageCosts:
    return replace(
        stage,
        forward=stage.forward + squares * forward,
        input_gradient=stage.input_gradient + squares * input_gradient,
    )
