"""What the slices of a step cost, and what ranks keep of them.

A slice costs what a microbatch of its length would, whose smaller products have a lower rate, and attention
to the slices before it on top.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_pp_ext.planner.step.additions import Addition
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.unit_costs import UnitCosts

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.workload import Workload

_KEYS_AND_VALUES = 2


class Sliced(Addition):
    """The seconds of slices, and the gradients of keys and values that wait for the slices before."""

    def in_step(self, work: "Workload", schedule: Schedule, costs: Costs) -> Costs:
        """See ``Addition``.

        ValueError where stages cost what a file says (--pipeline-costs), which is for whole sequences.
        """
        if not schedule.units:
            return costs
        if work.model.measured:
            raise ValueError(
                "--pipeline-slice-tokens needs the model's own costs, and --pipeline-costs has those of "
                "whole sequences: leave one out"
            )
        slices = schedule.microbatches // schedule.whole_microbatches
        tokens = work.job.model.seq_length // slices
        alone = _cut(work, tokens, 1).costs
        attention = _attention(work)
        whole = work.job.batch.micro_batch_size * tokens**2
        kinds = [
            Costs(
                tuple(
                    _with_prefix(stage, 2 * number * whole, *seconds)
                    for stage, seconds in zip(alone.stages, attention, strict=True)
                ),
                head=alone.head,
            )
            for number in range(slices)
        ]
        each = work.job.batch.micro_batch_size * tokens
        units = tuple(kinds[unit.slice] for unit in schedule.units)
        return UnitCosts(
            kinds[slices // 2].stages,
            alone.hop,
            alone.message,
            alone.head,
            alone.pair,
            units=units,
            tokens=(each,) * len(units),
        )

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: those of slices, and the gradients of a sequence's keys and values."""
        if not schedule.units:
            return peaks
        share = schedule.whole_microbatches / schedule.microbatches
        return tuple(
            share * peak + sum(_owed(work, stage) for stage in work.placement.stages_of(rank))
            for rank, peak in enumerate(peaks)
        )

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        """See ``Addition``."""
        if schedule.units:
            yield "in slices of sequences"


def _cut(work: "Workload", length: int, documents: int) -> "Workload":
    """Return the work of microbatches of so many times the ``documents``, each of this ``length``."""
    from megatron_pp_ext.planner.step.workload import Workload

    job = work.job
    cut = replace(
        job,
        model=replace(job.model, seq_length=length),
        batch=replace(job.batch, micro_batch_size=documents * job.batch.micro_batch_size),
    )
    return Workload(cut, work.system, work.placement, work.data, work.layers, is_split=work.is_split)


def _attention(work: "Workload") -> list[tuple[float, float]]:
    """Return the seconds of F and I of each stage for a squared token of attention."""
    length = work.job.model.seq_length
    squares = work.job.batch.micro_batch_size * (length**2 - 2 * (length // 2) ** 2)
    halves = _cut(work, length // 2, 2).costs.stages
    return [
        (
            max(0.0, whole.forward - half.forward) / squares,
            max(0.0, whole.input_gradient - half.input_gradient) / squares,
        )
        for whole, half in zip(_cut(work, length, 1).costs.stages, halves, strict=True)
    ]


def _with_prefix(stage: StageCosts, squares: float, forward: float, input_gradient: float) -> StageCosts:
    return replace(
        stage,
        forward=stage.forward + squares * forward,
        input_gradient=stage.input_gradient + squares * input_gradient,
    )


def _owed(work: "Workload", stage: int) -> float:
    """Return the bytes of the gradients of keys and values that later slices leave for earlier ones."""
    model, parallel = work.job.model, work.job.parallel
    tokens = model.seq_length * work.job.batch.micro_batch_size
    bytes_of = 2 if work.job.precision.is_half else 4
    width = _KEYS_AND_VALUES * model.key_heads * model.head_width / parallel.tensor_model_parallel_size
    return work.layers[stage] * tokens * width * bytes_of
