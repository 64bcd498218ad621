"""The pipeline that is in force in this process, the run that it is part of, and the other products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.compiler.source import Source
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import CostModel, Costs
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates
from megatron_pp_ext.schedule.placement import Placement

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.typed_job import Job
    from megatron_pp_ext.megatron.runners.pipeline_runner import PipelineRunner
    from megatron_pp_ext.megatron.runners.transport import ProcessGroups


PIPELINE = "pp"
"""The name of pipeline groups in Megatron's flags and files; their settings hold for ours too."""


class Saving(Protocol):
    """The part of a pipeline's makespan that another layout saves, by simulation."""

    @property
    def before(self) -> float:
        """The seconds with the layout of today."""

    @property
    def makespan(self) -> float:
        """The seconds with the other layout."""

    @property
    def gain(self) -> float:
        """The part of ``before`` that is saved."""


@dataclass(slots=True, eq=False)
class LastStep:
    """The numbers of the last training step, for the log of whoever trains."""

    is_wanted: bool = False
    """Whether training steps are timed."""
    is_logged: bool = True
    """Whether a trainer whose log this package hooks into has the numbers there."""
    numbers: Callable[[], dict[str, float]] = dict
    """Returns the numbers by name, none where no step was timed; collective over the pipeline."""
    plan_by: str = ""
    """What the last numbers' plan follows from (``step_numbers``); empty where a user gave the costs."""


type Advice = Callable[[Costs, Schedule, str, float], tuple[str, Saving] | None]
"""(costs, schedule, its name, free bytes) -> a shorter layout for the next start, if there is one.

ValueError for a model that cannot be estimated.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """A training run, as far as the pipeline has to know it.

    A value that is known only later, such as the step that a run resumes from, is a function.

    Megatron's own trainer fills it in from its arguments (``start_up.settings``); the defaults are for a
    training loop that sets nothing itself.
    """

    timeout: timedelta = timedelta(minutes=10)
    """How long a message may take before its job ends; the default is Megatron's own."""
    communicators: Path | None = None
    """A YAML file of settings of NCCL's groups, as Megatron reads it; messages take those of ``pp``."""
    has_priority: bool = False
    """Whether messages have streams of a high priority whatever that file has."""
    clip_grad: float = 0.0
    """The gradient norm that updates are clipped to; 0 where they are not."""
    train_steps: Callable[[], int] | None = None
    """Returns the training steps of the whole run, which a pipeline that never flushes has to know."""
    steps_done: Callable[[int], int] = lambda counted: counted
    """Returns the training steps before the one that runs, of which the runner has counted some itself."""
    message_bytes: Callable[[], float] = lambda: 0.0
    """Returns the bytes of a message, for schedules that are compiled from measurements."""
    advice: Advice | None = None
    """Looks for a better layout after the steps that were measured; None where nobody wants one."""
    estimate: CostModel | None = None
    """What the model's stages cost by its arithmetic, at any length of sequences; None where nobody knows."""
    seconds: CostModel | None = None
    """The costs of the stages that a user gave, whose times are taken as seconds; None without any."""
    seconds_by_rates: Callable[[Schedule, str], float | None] = lambda schedule, device: None
    """Returns the seconds of a step's pipeline by the planner's rates of a device, named as its driver does.

    None where nobody knows them.  ValueError for a model that cannot be estimated.
    """
    caveat: Callable[[], str] = lambda: ""
    """Returns a line about differences from a run under 1F1B; logged once, before the first step."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The requested pipeline: its request, its source of schedules, and its measurements.

    Without a ``source`` stock's own schedules run, with stock's own placement.
    """

    request: Request
    source: Source | None = None
    settings: Settings = field(default_factory=Settings)
    """The training run that the pipeline is part of."""
    trace: Path | None = None
    predicting: int | None = None
    """The stage that has multi-token prediction (MTP), with a copy of the embedding."""
    profile: Path | None = None
    """The file for the costs of every layer, measured under stock's schedules."""
    rehearsal: Path | None = None
    """The file for this rank's measurements while it runs without the others."""
    layers: tuple[int, ...] = ()
    """The number of layers of each stage; only a rehearsal sets it."""
    is_per_model: bool = False
    """Whether it is for the models that are built under it, while others may run stock's schedule;
    else it is for the one model of the process."""
    costs: Costs | None = None
    """The costs of the call; None where they follow from a model or from flags."""
    is_unproved: bool = False
    """Whether a call permits operation that was never tried on a GPU."""
    layout: str = ""
    """Words about a layout that this package chose; empty where the user gave it, or none."""
    summary: str = ""
    """The lines about the schedule that the first rank prints; other ranks need not have them."""
    last_step: LastStep = field(default_factory=LastStep)
    """One object for all that are derived from this pipeline."""

    @property
    def placement(self) -> Placement:
        """The placement of the stages, from the source, since a compiler may choose among several."""
        return self.source.placement if self.source else self.request.placement

    @property
    def updates(self) -> Updates | None:
        """The updates of a pipeline that never flushes; None where every step flushes."""
        return self.request.updates

    @property
    def replicas(self) -> Replicas | None:
        """The replicas of the stages; None where all have equally many."""
        if self.updates is None or self.updates.replicas.is_straight:
            return None
        return self.updates.replicas

    @property
    def name(self) -> str:
        return self.source.name if self.source else f"stock {self.placement.shape}"

    @property
    def has_embedding_with_head(self) -> bool:
        """Whether one rank holds the first and the last stage, as under a V; stock has them on two."""
        return self.source is not None and self.embedding_rank == self.placement.rank_of(
            self.placement.stages - 1
        )

    @property
    def embedding_rank(self) -> int:
        """The rank with the first stage, and, under a V, with the last stage too."""
        return self.placement.rank_of(0)

    @property
    def moves_stages(self) -> bool:
        """Whether a rank holds other parts of the model than under Megatron's own schedules."""
        return self.placement.has_mirrored or self.placement.splits_head

    def costs_of(self, schedule: Schedule, model: CostModel) -> Costs:
        """Return the costs of the actions of ``schedule``, whole microbatches or slices, by ``model``.

        ValueError for a model that cannot be estimated.
        """
        merged = model.merged_from(self.request.finest)
        if not schedule.units:
            return merged.of(self.placement)
        from megatron_pp_ext.features.units.sliced_orders import costs_in_units

        return costs_in_units(self.request, merged, schedule)

    def is_mirrored(self, chunk: int) -> bool:
        """Whether this chunk of every rank is placed from the other end."""
        return self.placement.is_mirrored(chunk)


_pipeline: Pipeline | None = None


def pipeline() -> Pipeline | None:
    """The requested pipeline; None where everything stays stock.

    Flags set it once, while Megatron validates its arguments; a call of ``install`` sets it for the models
    that are built from then on.  Where there is none, every hook does what stock does.
    """
    return _pipeline


def require() -> Pipeline:
    """The requested pipeline, for code that runs only when there is one."""
    if _pipeline is None:
        raise RuntimeError("no --pipeline-schedule is active")
    return _pipeline


def activate(pipeline: Pipeline | None) -> None:
    """Make ``pipeline`` the one that the hooks serve; None returns to stock."""
    global _pipeline
    _pipeline = pipeline


@contextmanager
def using(pipeline: Pipeline | None) -> Iterator[None]:
    """Make ``pipeline`` the one that the hooks serve within the context."""
    before = _pipeline
    activate(pipeline)
    try:
        yield
    finally:
        activate(before)


class Products:
    """The other products where none is loaded: what needs one raises ValueError.

    ``launch.AllProducts`` has all of them.
    """

    def require(self, pipeline: Pipeline) -> None:
        """Raise ValueError unless all is loaded that the steps of ``pipeline`` need."""
        if pipeline.updates is not None:
            raise _not_loaded(f"--pipeline-schedule {pipeline.request.schedule}")
        if pipeline.profile is not None:
            raise _not_loaded("--profile-pipeline")

    def flush_free(self, pipeline: Pipeline, transport: ProcessGroups) -> PipelineRunner:
        """Return the runner of steps that never flush, whose messages go over the groups of ``transport``."""
        raise _not_loaded(f"--pipeline-schedule {pipeline.request.schedule}")

    def profiling(
        self, group: dist.ProcessGroup, chunks: list[torch.nn.Module], forward_only: bool
    ) -> AbstractContextManager[None]:
        """Return a context around a step of Megatron's own schedule that measures every layer.

        ``group`` is the pipeline's, and ``forward_only`` is whether the step is an evaluation.
        """
        raise _not_loaded("--profile-pipeline")

    def layout(self, job: RequestedJob, data: int, rows: int) -> tuple[RequestedJob, str]:
        """Return ``job`` with a layout for ``auto``, and words about it.

        The job has ``data`` data-parallel ranks and an embedding of so many ``rows``.  ValueError where there
        is no layout to choose.
        """
        raise _not_loaded("--pipeline-model-parallel-layout auto")

    def better_layout(
        self, job: Job, data: int, costs: Costs, schedule: Schedule, name: str, free: float
    ) -> tuple[str, Saving] | None:
        """Return a layout for the next start and what it saves; None where none saves enough.

        ``costs`` are those of the stages, ``name`` is the schedule's, and the fullest device has ``free``
        bytes left.  ValueError for a model that cannot be estimated.
        """
        return None

    def pipeline_seconds(self, job: RequestedJob, data: int, schedule: Schedule, device: str) -> float | None:
        """Return the seconds from the first action of ``schedule`` to its last end, by a device's rates.

        The device is named as its driver does; None where its rates are not known.  ValueError for a job
        that cannot be estimated.
        """
        return None

    def comparison(self, job: RequestedJob, data: int) -> Sequence[str]:
        """Return lines that compare the step of ``job`` with that of Megatron's own schedules."""
        return ()


def _not_loaded(flag: str) -> ValueError:
    return ValueError(
        f"{flag} needs a part of megatron_pp_ext that is not loaded; start the script with "
        "python -m megatron_pp_ext, or let it call install of megatron_pp_ext.launch"
    )


_loaded = Products()


def use(products: Products) -> None:
    """Let training ask ``products`` from now on."""
    global _loaded
    _loaded = products


def loaded() -> Products:
    """Return the products that training asks."""
    return _loaded
