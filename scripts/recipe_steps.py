"""What becomes of a recipe under schedules: whether it starts, and its step by estimate beside its own."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job import flag_table, layers
from megatron_pp_ext.job.pipeline import for_world, stock_schedule
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.rules.rule import Refused
from megatron_pp_ext.job.sizes import data_parallel_size, require_vocabulary, smallest_world
from megatron_pp_ext.planner.layout import requested_layout
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import derive_arguments, require_complete
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO
from reference.pipelined_recipes import PipelinedRecipe

LAYOUT, VIRTUAL = "pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"

SPREAD = [*map(flag_table.name_of, layers.SPREAD)]
"""The arguments that spread layers in another way than a layout."""

MOST_ACTIONS = 250_000
"""The actions of the longest step that is estimated; a thousand take 10 to 30 milliseconds."""

NO_LONGER = 1.005
"""How long a leaner step may take, as a part of the recipe's own, to count as no longer."""


def job_of(recipe: PipelinedRecipe) -> RequestedJob:
    """Return the job of ``recipe`` under Megatron's own schedule."""
    values = dict(recipe.arguments)
    if recipe.without_config:
        # What its other settings need of the model's.
        if (ways := values.get("expert_model_parallel_size", 1)) > 1:
            values["num_experts"] = ways
        values["mtp_num_layers"] = (values.get(LAYOUT) or "").count("m") or values.get("mtp_num_layers")
    args, _ = flag_table.parse([], values)
    derive_arguments(args)
    return RequestedJob.of_args(args)


def gpus_of(recipe: PipelinedRecipe, job: RequestedJob) -> int:
    """Return the GPUs of ``recipe``: those in its name, or where they are too few the fewest that do."""
    with suppress(ValueError):
        for_world(job, recipe.gpus)
        return recipe.gpus
    return smallest_world(job)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job starts: ``error`` is the flag or the words that refuse it, "" where none do.

    ``is_unproved`` is whether it needs --pipeline-unproved for that.
    """

    error: str
    is_unproved: bool = False

    @property
    def starts(self) -> bool:
        return not self.error


def verdict(job: RequestedJob, gpus: int) -> Verdict:
    """Return whether ``job`` starts on ``gpus`` GPUs."""
    error = _error(job, gpus)
    if error and job.precision.cuda_graph_impl != "none":
        unproved = _error(job.with_arguments(pipeline_unproved=True), gpus)
        return Verdict(unproved, is_unproved=unproved != error)
    return Verdict(error)


def _error(job: RequestedJob, gpus: int) -> str:
    try:
        for_world(job, gpus)
    except Refused as error:
        return error.rule.flag
    except ValueError as error:
        return str(error)
    return ""


def stock(job: RequestedJob, gpus: int) -> Verdict:
    """Return whether Megatron itself starts ``job`` on ``gpus`` GPUs."""
    if (result := verdict(job, gpus)).starts and job.model.layers:
        chunks = layers.chunks_requested(job) or 1
        try:
            layers.by_stage(job, chunks * job.parallel.pipeline_model_parallel_size)
        except ValueError as error:
            return Verdict(str(error))
    return result


def unchanged(job: RequestedJob, gpus: int) -> Verdict:
    """Return whether ``job`` starts with the flag of the schedule that it has anyway, and nothing else."""
    return verdict(job.with_arguments(pipeline_schedule=stock_schedule(job)), gpus)


def split(job: RequestedJob, gpus: int) -> Verdict:
    """Return whether ``job`` starts under some schedule that splits its backward; else the first's error."""
    verdicts = (
        verdict(changed, gpus) for name, changed in others(job) if catalog.entry(name).splits_backward
    )
    first = next(verdicts)
    return first if first.starts else next((each for each in verdicts if each.starts), first)


def others(job: RequestedJob) -> Iterator[tuple[str, RequestedJob]]:
    """Yield the schedules that are tried in the place of a job's own, and ``job`` with each.

    Where pairs are asked for, these are the schedules that have some.  Stages have equally many layers, but
    where a schedule has as many chunks as the recipe, which keeps its layout then.
    """
    own, in_pairs = layers.chunks_requested(job) or 1, job.parallel.overlap_moe_expert_parallel_comm
    for name in ("v-half", "v-min", "v-zb", "1f1b-v", "dualpipe-v", "zb-h1", "zb-h2", "interleaved-zb"):
        entry = catalog.entry(name)
        chunks = own if entry.more_chunks else entry.chunks
        if chunks < entry.chunks or (in_pairs and entry.make_paired is None):
            continue
        if chunks == own and entry.shape != "v":
            yield name, job.with_arguments(pipeline_schedule=name)
            continue
        yield (
            name,
            job.with_arguments(
                pipeline_schedule=name,
                **{LAYOUT: even_layout(job, chunks), VIRTUAL: None},
                **dict.fromkeys(SPREAD),
            ),
        )


def even_layout(job: RequestedJob, chunks: int) -> str | None:
    """Return the layout of ``job`` with so many chunks a rank, as even as can be, fewer where the loss is.

    None for a model whose layers are not known, or are cut by its pattern.
    """
    count, stages = job.model.layers, chunks * job.parallel.pipeline_model_parallel_size
    if not count or job.model.pattern:
        return None
    return spelled_even(count, stages, job.model.mtp_num_layers)


def spelled_even(count: int, stages: int, predictions: int) -> str:
    """Return the layout of ``count`` layers in ``stages``, and of MTP's before the loss."""
    least, more = divmod(count, stages)
    sizes = [least + (stage < more) for stage in range(stages)]
    cells = ["t" * size for size in sizes]
    cells[0] = f"E{cells[0]}"
    cells[-1] += "m" * predictions + "L"
    return "|".join(cells)


@dataclass(frozen=True, slots=True)
class Step:
    """A step under a schedule by estimate: its seconds and the bytes of the fullest rank.

    ``layout`` is "own" for the recipe's stages, "even" or "auto".
    """

    schedule: str
    layout: str
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The step of a recipe as it is, and the better ones of it under this package's schedules.

    ``shortest`` fits the GPU, or needs no more than the recipe's own by its estimate.  ``leanest`` has the
    least memory of those that are no longer than the own one.  Both are the own one where none is better.
    ``microbatches`` are those of a step, and ``bubble`` is the idle part of the own one's pipeline.
    """

    microbatches: int
    bubble: float
    device_bytes: float
    own: Step
    shortest: Step
    leanest: Step

    @property
    def shorter(self) -> float:
        """The part of the own step's seconds that the shortest one saves."""
        return 1 - self.shortest.seconds / self.own.seconds

    @property
    def leaner(self) -> float:
        """The part of the own step's bytes that the leanest one saves."""
        return 1 - self.leanest.bytes / self.own.bytes


WITHOUT_CONFIG, ADAPTERS, DEVICE = "no config.json", "adapters alone", "no rates of the GPU"
"""Why a recipe has no estimate, before the planner's own reasons."""


def steps(recipe: PipelinedRecipe) -> Steps:
    """Return the steps of ``recipe``; ValueError, in words for the page, where there is no estimate."""
    if recipe.without_config:
        raise ValueError(WITHOUT_CONFIG)
    if recipe.trains_adapters:
        raise ValueError(ADAPTERS)
    if recipe.device not in system.shipped():
        raise ValueError(DEVICE)
    job, machine = job_of(recipe), system.read(recipe.device)
    require_complete(job.args, "it")
    require_vocabulary(job)
    all_rules.refuse_to_plan(job)
    gpus = gpus_of(recipe, job)
    request = for_world(job, gpus)
    estimated = estimate_request(job, machine, request)
    own = Step(request.schedule, "own", estimated.step_seconds, estimated.fullest.total)
    tried = [own, *_tried(job, gpus, machine)]
    limit = max(machine.memory_bytes, own.bytes)
    return Steps(
        microbatches=request.microbatches,
        bubble=estimated.bubble,
        device_bytes=machine.memory_bytes,
        own=own,
        shortest=min((step for step in tried if step.bytes <= limit), key=lambda step: step.seconds),
        leanest=min(
            (step for step in tried if step.seconds <= NO_LONGER * own.seconds), key=lambda step: step.bytes
        ),
    )


def _tried(job: RequestedJob, gpus: int, machine: System) -> Iterator[Step]:
    """Yield the steps of ``job`` under all schedules that it may have, those of a V by two layouts."""
    own = job.pipeline.pipeline_model_parallel_layout
    for name, changed in others(job):
        permitted = changed.with_arguments(pipeline_unproved=True)
        layout = permitted.pipeline.pipeline_model_parallel_layout
        with suppress(ValueError):
            yield _step(permitted, gpus, machine, name, "own" if layout == own else "even")
            if name in _WITH_AUTO:
                yield _step(_with_auto(permitted, gpus), gpus, machine, name, AUTO)


_WITH_AUTO = "v-half", "v-zb", "dualpipe-v", "zb-h1"
"""The schedules that are estimated with a layout of the planner's, too."""


def _with_auto(job: RequestedJob, gpus: int) -> RequestedJob:
    asking = job.with_arguments(**{LAYOUT: AUTO}, **dict.fromkeys(SPREAD))
    return requested_layout.resolve(asking, data_parallel_size(asking, gpus), asking.padded_vocabulary)[0]


def _step(job: RequestedJob, gpus: int, machine: System, name: str, layout: str) -> Step:
    request = for_world(job, gpus)
    actions = request.finest.stages * request.microbatches * (3 if request.may_split_backward else 2)
    if actions > MOST_ACTIONS:
        raise ValueError(f"a step of {actions} actions takes too long to be estimated here")
    estimated = estimate_request(job, machine, request)
    return Step(name, layout, estimated.step_seconds, estimated.fullest.total)
