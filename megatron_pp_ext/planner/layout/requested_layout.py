"""The layout for which ``auto`` stands in --pipeline-model-parallel-layout: that of the shortest pipeline.

It follows from flags and files alone, so that every rank of a job finds the same one before Megatron reads
the flag.  No rank needs more memory for it than the fullest one does with equally many layers in all stages.
"""

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.job import layers, pipeline
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.balance import even
from megatron_pp_ext.planner.layout.model_row import ModelRow, without_messages, work_of
from megatron_pp_ext.planner.layout.model_stages import ModelStages
from megatron_pp_ext.planner.layout.rows import NOTHING, LayerRow, LayoutRow, seconds_of, shortest
from megatron_pp_ext.planner.layout.stage_seconds import StageSeconds
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file, csv_file
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.schedule.placement import Placement, linear, loop

_FLAG = f"--pipeline-model-parallel-layout {AUTO}"


def resolve(asked: RequestedJob, data: int, vocabulary: int) -> tuple[RequestedJob, str]:
    """Return ``asked`` with a layout for ``auto``, and words about it for the start line.

    ``data`` is the data-parallel size and ``vocabulary`` the number of rows of the embedding.  The costs of a
    layer are those of --pipeline-costs, which then has an object for each layer, or follow from its
    operations.  ValueError where there is nothing to choose, and where ``job.pipeline.read`` refuses the job.
    """
    _require_choice(asked)
    ranks, file = asked.job.parallel.pipeline_model_parallel_size, asked.job.pipeline.pipeline_costs
    chunks = _chunks(asked.job)
    placement = linear(ranks) if chunks == 1 else loop(ranks, chunks)
    job = asked.job.changed(
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_model_parallel_layout=None,
        vocab_size=asked.job.model.vocab_size or vocabulary,
    )
    model = model_parts(job)
    cuts = ModelStages(job, StageSeconds(job, model), placement)
    even_counts = cuts.with_prediction(even(cuts.layers, (1,) * placement.stages))
    # The request is that of even stages: only their numbers of layers are to change.
    even_stages = _laid_out(asked, cuts.spelled(even_counts))
    request = pipeline.read(even_stages, data)

    def costs_of(stages: int, splits_head: bool) -> Costs:
        if file is not None:
            return costs_file.read(file).joined(layers.by_stage(even_stages.job, stages))
        finest = Placement(request.finest.shape, ranks, stages // ranks, splits_head)
        cut = job.changed(pipeline_model_parallel_layout=cuts.spelled(even_counts))
        return without_messages(work_of(cut, model, data, finest).costs)

    schedule = make(request, costs_of).schedule
    row: LayoutRow = ModelRow(job, model, data, schedule, request.schedule)
    if file is not None:
        costs = costs_file.read(file)
        rows = tuple(map(seconds_of, costs.stages))
        row = LayerRow(rows, NOTHING, NOTHING, costs, placement, (1,) * placement.stages, row.totals)
    best = shortest(schedule, row, even_counts)
    layout = cuts.spelled(best.cut)
    return (
        _laid_out(asked, layout),
        f"layout {layout}, by prediction {best.gain:.1%} shorter than stages of as many layers each",
    )


def _laid_out(asked: RequestedJob, layout: str) -> RequestedJob:
    return asked.changed(pipeline_model_parallel_layout=layout, num_virtual_stages_per_pipeline_rank=None)


def _require_choice(asked: RequestedJob) -> None:
    """Raise ValueError where ``asked`` leaves no layout to choose, or its costs are not those of layers."""
    all_rules.refuse(asked)
    all_rules.refuse_to_predict(asked)
    job, file = asked.job, asked.job.pipeline.pipeline_costs
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
    """Return the chunks a rank for which the layout is made."""
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
