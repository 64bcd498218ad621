"""The costs of slices, and the choice of their length: ``--pipeline-slice-tokens auto``.

A slice costs what a microbatch of its length would, whose smaller products have a lower rate, and attention
to the slices before it on top.  Short slices fill the pipeline sooner, but have that rate, and there are more
messages.  The rates are those of one machine, whatever the run has, and the memory is that of the run's
devices, so that an estimate for the same devices chooses what training chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, partial

import numpy as np

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.optimizers import Sharing, model_state
from megatron_pp_ext.costs.stages import cost_model, stage_costs, stage_parts, stage_seconds
from megatron_pp_ext.features.units.options import SLICE_FLAG, job_slices, sizes
from megatron_pp_ext.features.units.rates import AMOUNTS, LengthCosts
from megatron_pp_ext.features.units.rules import ranks_of_sequence
from megatron_pp_ext.features.units.units import named_units
from megatron_pp_ext.job import layers
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.actions import Action, Schedule, UnitName
from megatron_pp_ext.schedule.costs import Costs, StageCosts, UnitCosts
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.simulate import simulate
from megatron_pp_ext.setting_error import SettingError

CostsOf = Callable[[Job], Costs]
"""Returns the costs of the stages for a microbatch of a job, which differs from others in its batch alone."""


def cut(job: Job, length: int, documents: int = 1) -> Job:
    """Return ``job`` with sequences of this ``length``, and so many times as many in a microbatch.

    They are slices, whose attention context-parallel ranks share by heads.
    """
    rows = documents * job.batch.micro_batch_size
    return job.changed(seq_length=length, micro_batch_size=rows, pipeline_slice_tokens=length)


def of_slices(costs_of: CostsOf, job: Job, names: Sequence[UnitName]) -> UnitCosts:
    """Return the costs of units with these ``names``, which are slices of the sequences of ``job``.

    A slice takes as long as a microbatch of its length, interpolated between the longest and the shortest
    one, and attention to the slices before it.  It keeps what plans count.
    """
    rows, count = job.batch.micro_batch_size, len(names)
    spans = {(name.begin, name.end) for name in names}
    lengths = sorted({end - begin for begin, end in spans})
    least, most = lengths[0], lengths[-1]
    ends = [costs_of(cut(job, length)) for length in (least, most)]
    length, mean = job.model.seq_length, ends[-1]
    halves, whole = costs_of(cut(job, length // 2, 2)), costs_of(cut(job, length))
    attention = _attention(halves, whole, rows * (length**2 - 2 * (length // 2) ** 2))
    kept = _memory(halves, whole, length, names)

    def unit(begin: int, end: int, memory: Costs) -> Costs:
        part = (end - begin - least) / (most - least) if most > least else 1.0
        squares = rows * 2 * begin * (end - begin)
        stages = (
            replace(
                stage,
                forward=stage.forward + squares * forward,
                input_gradient=stage.input_gradient + squares * backward,
                **{name: getattr(amounts, name) for name in AMOUNTS},
            )
            for stage, (forward, backward), amounts in zip(
                _between(ends[0].stages, mean.stages, part), attention, memory.stages, strict=True
            )
        )
        return Costs(tuple(stages), head=mean.head)

    # Sequences that are cut alike share their units' costs.
    kept_by_span = {(name.begin, name.end): memory for name, memory in zip(names, kept.units, strict=True)}
    units = {span: unit(*span, memory) for span, memory in kept_by_span.items()}
    longest = max(spans, key=lambda span: (span[1] - span[0], span[1]))
    return UnitCosts(
        units[longest].stages,
        mean.hop,
        mean.message,
        mean.head,
        mean.pair,
        units=tuple(units[name.begin, name.end] for name in names),
        tokens=tuple(rows * (name.end - name.begin) for name in names[:count]),
        shared=kept.shared,
    )


def _memory(halves: Costs, whole: Costs, length: int, names: Sequence[UnitName]) -> UnitCosts:
    """Return what slices with these ``names`` keep, as plans count it, alone and for others."""
    units = named_units(names)
    step = LengthCosts.through(halves, 2, whole, length).of(units)
    places = {(unit.microbatch, unit.prefix): number for number, unit in enumerate(units.units)}
    return step.ordered([places[name.microbatch, name.begin] for name in names])


def _between(short: Sequence[StageCosts], long: Sequence[StageCosts], part: float) -> Iterator[StageCosts]:
    """Yield the costs of stages that are so large a ``part`` of the way from ``short`` to ``long``."""
    for low, high in zip(short, long, strict=True):
        values = {cost.name: getattr(low, cost.name) for cost in fields(StageCosts)}
        yield replace(
            high, **{name: value + part * (getattr(high, name) - value) for name, value in values.items()}
        )


def peaks_of(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the most that each rank keeps at one time."""
    alike = _alike(costs) if isinstance(costs, UnitCosts) else [0] * schedule.microbatches

    @cache
    def moved(action: Action) -> tuple[float, float]:
        return costs.growth(action), costs.kept(action)

    def peak(order: Sequence[Action]) -> float:
        moves = [moved(action._replace(microbatch=alike[action.microbatch])) for action in order]
        growth, kept = np.array(moves).T
        return float((growth + kept.cumsum() - kept).max())

    return tuple(map(peak, schedule.orders))


def _alike(costs: UnitCosts) -> list[int]:
    """Return for each unit the number of the first one with its costs, which sequences cut alike share."""
    shared = costs.shared or [()] * len(costs.units)
    units = [(id(unit), id(memory)) for unit, memory in zip(costs.units, shared, strict=True)]
    first = {unit: number for number, unit in reversed([*enumerate(units)])}
    return [first[unit] for unit in units]


def _attention(halves: Costs, whole: Costs, squares: float) -> list[tuple[float, float]]:
    """Return the seconds of F and I of each stage for a squared token of attention.

    Whole sequences have so many ``squares`` more than their halves.
    """
    return [
        (
            max(0.0, long.forward - short.forward) / squares,
            max(0.0, long.input_gradient - short.input_gradient) / squares,
        )
        for long, short in zip(whole.stages, halves.stages, strict=True)
    ]


MACHINE = "h100"
"""The machine whose rates decide, and whose memory where a run does not know its own."""

MARGIN = 0.05
"""The part of activations that allocators leave unused, as in estimates."""

_TRIALS = 200
"""The orders that the compiler may try for whole sequences, which are one candidate of several."""

_MOST_ACTIONS = 50_000
"""The actions of the largest step that is tried: fewer microbatches stand for more, and in the slices that
even these leave too many of nothing is gained that larger ones lack."""


def chosen(job: RequestedJob, request: Request, rows: int, memory: float | None = None) -> int:
    """Return the tokens of the slices with which a step of ``request`` is shortest by simulation.

    They are the length of the sequence where whole ones are best.  Of those that keep ``memory`` bytes, that
    of ``MACHINE`` where it is None, the shortest step wins; where none does, the one that needs least.  The
    model is that of ``job``, whose embedding has ``rows`` rows.  ValueError where its costs are not known,
    and where no length keeps the memory limit.
    """
    length = job.model.seq_length
    if request.is_stock or request.ranks == 1:
        return length
    if not (length and job.model.hidden_size and job.model.num_attention_heads):
        raise SettingError(f"{SLICE_FLAG} {AUTO} needs the sizes of the model: give a number of tokens")
    all_rules.refuse_to_predict(job)
    tried, reason = list[tuple[float, float, int]](), ValueError()
    bytes_of_device = memory or system.read(MACHINE).memory_bytes
    for tokens in sizes(length, ranks_of_sequence(job)):
        try:
            seconds, needed = _tried(job, request, rows, tokens)
        except ValueError as error:  # a limit that shorter slices may keep
            reason = error
        else:
            tried.append((max(0.0, needed / bytes_of_device - 1), seconds, tokens))
    if not tried:
        raise reason
    return min(tried)[-1]


def _tried(job: Job, request: Request, rows: int, tokens: int) -> tuple[float, float]:
    """Return the simulated step in slices of ``tokens``, and the bytes of the fullest rank.

    Many microbatches are counted by fewer: each further one takes what the busiest rank works on it.
    ValueError where no order fits.
    """
    # Imported here because it takes numba, which an estimate of whole sequences does without.
    from megatron_pp_ext.features.units.sliced_orders import sliced

    machine = system.read(MACHINE)
    option = job_slices(job, tokens)
    fewest, count = request.ranks, min(request.microbatches, _microbatches(job, request, tokens))
    if count < min(request.microbatches, fewest):
        raise ValueError(f"slices of {tokens} tokens make more actions than are tried: give longer ones")
    few = replace(
        request.with_option(option),
        microbatches=count,
        ordinary=request.ordinary or request.microbatches,
        trials=min(request.trials, _TRIALS),
    )
    costs = cost_model(job, lambda job, placement: stage_costs(job, placement, rows))
    before = partial(make, costs=costs, is_proved=True)
    schedule = (sliced(few, option, costs, before, 0.0) if option.cuts else before(few)).schedule
    placement = schedule.placement

    def costs_of(job: Job) -> Costs:
        return stage_seconds(job, placement.stages, rows, machine, request.data)

    of_units = of_slices(costs_of, job, schedule.units) if schedule.units else costs_of(job)
    timeline = simulate(schedule, of_units)
    busiest = max(sum(of_units.seconds(action) for action in order) / count for order in schedule.orders)
    seconds = timeline.makespan + (request.microbatches - count) * busiest
    return seconds, max(_bytes(job, request.data, schedule, of_units, rows))


def _microbatches(job: Job, request: Request, tokens: int) -> int:
    """Return for how many microbatches in slices of ``tokens`` a step is tried at most."""
    slices = 1 if tokens >= job.model.seq_length else 2 * job.model.seq_length // tokens
    actions = request.finest.stages * (3 if request.may_split_backward else 2) * slices
    return min(2 * request.ranks, _MOST_ACTIONS // actions)


def _bytes(job: Job, data: int, schedule: Schedule, costs: Costs, rows: int) -> Iterator[float]:
    """Yield the bytes of each rank in a step of ``schedule``, whose actions have these ``costs``."""
    model, placement = model_parts(job, vocabulary=rows), schedule.placement
    parts = stage_parts(job, model, layers.by_stage(job, placement.stages))
    tensor, dense = job.parallel.tensor_model_parallel_size, data * job.parallel.context_parallel_size
    sharing = Sharing(dense, max(1, dense * tensor // job.parallel.expert_ranks))
    buffers = model.buffers + schedule.splits_backward * model.gather_buffers
    for rank, moving in enumerate(peaks_of(schedule, costs)):
        stages = placement.stages_of(rank)
        first, *rest = (parts[stage] for stage in stages)
        state = model_state(job, sum(rest, first), sharing)
        if placement.stages - 1 in stages:
            moving += schedule.largest_share * model.loss_workspace
        fixed = state.weights + state.gradients + state.optimizer + buffers
        yield fixed + (1 + MARGIN) * moving + system.read(MACHINE).reserved_bytes
