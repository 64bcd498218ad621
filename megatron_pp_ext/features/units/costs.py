"""The costs of equal slices, and the choice of their length: ``--pipeline-slice-tokens auto``.

A slice costs what a microbatch of its length would, whose smaller products have a lower rate, and attention
to the slices before it on top.  Short slices fill the pipeline sooner, but have that rate, and there are more
messages.  The rates are those of one machine, whatever the run has, so that an estimate chooses what training
chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import LARGEST, Request
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.stages import stage_costs, stage_seconds
from megatron_pp_ext.features.units.options import SLICE_FLAG, SMALLEST, Slices
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import UnitName
from megatron_pp_ext.schedule.costs import CostModel, Costs, UnitCosts
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.setting_error import SettingError

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
                replace(
                    stage,
                    forward=stage.forward + 2 * number * squares * forward,
                    input_gradient=stage.input_gradient + 2 * number * squares * backward,
                )
                for stage, (forward, backward) in zip(alone.stages, attention, strict=True)
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


MACHINE = "h100"
"""The machine whose rates decide."""

_TRIALS = 200
"""The orders that the compiler may try for whole sequences, which are one candidate of several."""

_LOSSES = 3
"""After how many candidates in a row that are longer than the best one no shorter slices are tried."""


def chosen(job: RequestedJob, request: Request, rows: int) -> int:
    """Return the tokens of the slices with which a step of ``request`` is shortest by simulation.

    They divide the sequence, whose length they are where whole sequences are best.  The model is that of
    ``job``, whose embedding has ``rows`` rows.  ValueError where its costs are not known, and where no
    length keeps the memory limit.
    """
    length = job.model.seq_length
    if request.is_stock or request.ranks == 1:
        return length
    if not (length and job.model.hidden_size and job.model.num_attention_heads):
        raise SettingError(f"{SLICE_FLAG} {AUTO} needs the sizes of the model: give a number of tokens")
    all_rules.refuse_to_predict(job)
    best, least, losses, reason = 0, float("inf"), 0, ValueError()
    for tokens in _candidates(job, request):
        try:
            seconds = _seconds(job, request, rows, length // tokens)
        except ValueError as error:  # a limit that shorter slices may keep
            reason = error
            continue
        if seconds < least:
            best, least, losses = tokens, seconds, 0
        elif (losses := losses + 1) == _LOSSES:
            break
    if not best:
        raise reason
    return best


def _candidates(job: Job, request: Request) -> Iterator[int]:
    """Yield the lengths that ``job`` permits, the longest first, which is that of the whole sequence."""
    length, shared = job.model.seq_length, job.parallel.sequence_ranks
    kinds = 3 if request.may_split_backward else 2
    most = LARGEST // (request.finest.stages * kinds * request.microbatches)
    for slices in range(1, max(1, min(most, length // SMALLEST)) + 1):
        if slices == 1 or (length % slices == 0 and length // slices % shared == 0):
            yield length // slices


def _seconds(job: Job, request: Request, rows: int, slices: int) -> float:
    """Return the simulated step with so many ``slices`` of every sequence; ValueError where no order fits."""
    if slices == 1 and request.is_compiled:
        request = replace(request, trials=min(request.trials, _TRIALS))
    cut = request.with_option(Slices(job.model.seq_length // slices, slices))
    schedule = make(cut, CostModel(lambda placement: stage_costs(job, placement, rows))).schedule
    machine, stages = system.read(MACHINE), schedule.placement.stages

    def costs_of(job: Job) -> Costs:
        return stage_seconds(job, stages, rows, machine, request.data)

    return simulate(
        schedule, of_slices(costs_of, job, slices, schedule.units) if schedule.units else costs_of(job)
    ).makespan
