"""The layout of --pipeline-model-parallel-layout auto, and the one that measured stages advise."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.job import layers, pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.cut import even
from megatron_pp_ext.planner.layout.rows import (
    NOTHING,
    LayerRow,
    LayoutRow,
    ModelRow,
    ModelStages,
    Seconds,
    Shortest,
    StageSeconds,
    seconds_of,
    shortest,
    without_messages,
    work_of,
)
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.entry import AUTO
from megatron_pp_ext.schedule.formats import costs_file, csv_file
from megatron_pp_ext.schedule.placement import Placement, linear, loop

_FLAG = f"--pipeline-model-parallel-layout {AUTO}"


def resolve(job: RequestedJob, data: int, vocabulary: int) -> tuple[RequestedJob, str]:
    """Return ``job`` with a layout for ``auto``, and words about it for the start line.

    ``data`` is the data-parallel size and ``vocabulary`` the number of rows of the embedding.  The costs of a
    layer are those of --pipeline-costs, which then has an object for each layer, or follow from its
    operations.  ValueError where there is nothing to choose, and where ``job.pipeline.read`` refuses the job.

    It follows from flags and files alone, so that every rank of a job finds the same one before Megatron
    reads the flag.  No rank needs more memory for it than the fullest one does with equally many layers in
    all stages.
    """
    _require_choice(job)
    ranks, file = job.parallel.pipeline_model_parallel_size, job.pipeline.pipeline_costs
    chunks = _chunks(job)
    placement = linear(ranks) if chunks == 1 else loop(ranks, chunks)
    plain = job.changed(
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=None,
        vocab_size=job.model.vocab_size or vocabulary,
    )
    model = model_parts(plain)
    cuts = ModelStages(plain, StageSeconds(plain, model), placement)
    even_counts = cuts.with_prediction(even(cuts.layers, (1,) * placement.stages))
    # The request is that of even stages: only their numbers of layers are to change.
    even_stages = _laid_out(job, cuts.spelled(even_counts))
    request = pipeline.read(even_stages, data)

    def estimate(placement: Placement) -> Costs:
        if file is not None:
            return costs_file.read(file).joined(layers.by_stage(even_stages, placement.stages))
        cut = plain.changed(pipeline_model_parallel_layout=cuts.spelled(even_counts))
        return without_messages(work_of(cut, model, data, placement).costs)

    schedule = make(request, CostModel(estimate)).schedule
    row: LayoutRow = ModelRow(plain, model, data, schedule, request.schedule)
    if file is not None:
        costs = costs_file.read(file)
        rows = tuple(map(seconds_of, costs.stages))
        row = LayerRow(rows, NOTHING, NOTHING, costs, placement, (1,) * placement.stages, row.totals)
    best = shortest(schedule, row, even_counts)
    layout = cuts.spelled(best.cut)
    return (
        _laid_out(job, layout),
        f"layout {layout}, by prediction {best.gain:.1%} shorter than stages of as many layers each",
    )


def _laid_out(job: RequestedJob, layout: str) -> RequestedJob:
    return job.with_arguments(
        pipeline_model_parallel_layout=layout, num_virtual_stages_per_pipeline_rank=None
    )


def _require_choice(job: RequestedJob) -> None:
    """Raise ValueError where ``job`` leaves no layout to choose, or costs are not those of its layers."""
    all_rules.refuse(job)
    all_rules.refuse_to_predict(job)
    file = job.pipeline.pipeline_costs
    count, stages = job.model.layers, job.parallel.pipeline_model_parallel_size * _chunks(job)
    if count < stages:
        raise ValueError(
            f"{_FLAG} has {stages} stages to fill with --num-layers {count}; lower "
            "--pipeline-model-parallel-size, or describe stages without layers yourself"
        )
    if file is None:
        return
    objects = len(costs_file.read(file).stages)
    if objects != count:
        raise ValueError(
            f"{_FLAG} needs the costs of each layer, but {file} has {objects} objects in "
            f"'stages' for --num-layers {count}; give one a layer, the ends with embedding and loss"
        )


def _chunks(job: Job) -> int:
    name, virtual_stages = job.pipeline.pipeline_schedule, job.pipeline.num_virtual_stages_per_pipeline_rank
    if virtual_stages is not None:
        return virtual_stages
    can = catalog.abilities(name)
    if name is None or not can.flushes:
        return 1
    if can.is_compiled:
        return 2 if job.model.layers >= 2 * job.parallel.pipeline_model_parallel_size else 1
    if can.file is not None:
        return csv_file.read(can.file).placement.chunks
    return catalog.entry(name).chunks


_WORTH = 0.01
"""The part of the makespan that another layout has to save to be advised."""


def advised(
    job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float = 0.0
) -> tuple[str, Shortest] | None:
    """Return a layout that is shorter than that of ``job`` by a hundredth at least, or None.

    ``costs`` are the costs of the stages of ``schedule``, which is called ``name``, and ``data`` is the
    data-parallel size.  ``free`` are the bytes that the fullest device leaves for activations and messages.
    By estimate no rank needs more than that, or than the fullest one needs now.  Nothing is advised for a
    model that is cut by its pattern, or with multi-token prediction in another stage than the loss.
    ValueError for layers that cannot be estimated.
    """
    stages = schedule.placement.stages
    if job.model.pattern or layers.predicting_stage(job, stages) not in (None, stages - 1):
        return None
    present = tuple(layers.by_stage(job, stages))
    model = model_parts(job)
    described = ModelRow(job, model, data, schedule, name)
    sizes = [part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
             for part in model.layers]  # fmt: skip
    seconds, front, back = divided(costs, sizes, present)
    least = [*described.least]
    for end, extra in ((0, front), (-1, back)):
        least[end] = max(least[end], int(not all(extra[:3])))
    fewest = tuple(map(min, least, present))
    row = LayerRow(
        seconds,
        front,
        back,
        costs,
        schedule.placement,
        fewest,
        lambda cut: described.totals(described.with_prediction(cut)),
    )
    best = shortest(schedule, row, present, described.capacity(described.with_prediction(present), free))
    if best.gain < _WORTH:
        return None
    return described.spelled(described.with_prediction(best.cut)), best


def divided(
    costs: Costs, sizes: Sequence[float], counts: Sequence[int]
) -> tuple[tuple[Seconds, ...], Seconds, Seconds]:
    """Return the seconds of every layer, and of the first and the last stage's other work.

    Stage s has ``counts[s]`` layers, which share its seconds in ``costs`` in proportion to their ``sizes``.
    In the first and the last stage they take at most the time of layers of their size between these, by the
    median, or in the first stage where nothing is between.  The remainder is the embedding's or the loss's.
    """
    totals = [sum(sizes[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    *by_kind, saved = zip(*map(seconds_of, costs.stages), strict=True)
    rates, front, back = zip(*(_rates(took, totals) for took in by_kind), strict=True)
    # All of a stage saves in proportion to its I.
    parts = [saving / stage.input_gradient for saving, stage in zip(saved, costs.stages, strict=True)]
    rates = *rates, [part * rate for part, rate in zip(parts, rates[1], strict=True)]
    front, back = (*front, parts[0] * front[1]), (*back, parts[-1] * back[1])
    by_stage = list(zip(*rates, strict=True))
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    seconds = [
        tuple(rate * size for rate in by_stage[stage]) for stage, size in zip(stages, sizes, strict=True)
    ]
    return tuple(seconds), front, back


def _rates(took: Sequence[float], totals: Sequence[float]) -> tuple[list[float], float, float]:
    """Return each stage's seconds for a layer of size 1, and the seconds of embedding and output head."""

    def extra(end: int) -> float:
        if not totals[end]:
            return took[end]
        return took[end] - usual * totals[end] if took[end] / totals[end] > usual else 0.0

    rates = [
        stage_seconds / total if total else 0.0 for stage_seconds, total in zip(took, totals, strict=True)
    ]
    usual = median([rate for rate in rates[1:-1] if rate] or [rates[0] or inf])
    front, back = extra(0), extra(-1)
    rates[0], rates[-1] = min(rates[0], usual), min(rates[-1], usual)
    return rates, front, back
