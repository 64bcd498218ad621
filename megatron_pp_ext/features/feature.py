"""What a feature may add, from its flags to the hooks in Megatron: one method for each, which adds nothing.

A feature subclasses ``Feature`` in ``features/NAME/feature.py`` and overrides what it adds.  The rest of the
package asks ``for feature in FEATURES`` where it needs to know.  Methods import what they work with when they
are called, so that this file is below all others, and who asks a feature about schedules loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from megatron_pp_ext.compiler.bounds import Cut
    from megatron_pp_ext.compiler.make import Made, Make
    from megatron_pp_ext.compiler.request import Option, Request
    from megatron_pp_ext.job.requested_job import RequestedJob
    from megatron_pp_ext.job.rules.rule import Rules
    from megatron_pp_ext.megatron.requested import Pipeline
    from megatron_pp_ext.megatron.runners.flushed import Guide, StepPart
    from megatron_pp_ext.planner.search.candidate import Variants
    from megatron_pp_ext.planner.step.workload import Addition
    from megatron_pp_ext.runtime.operations import Extension, RankOrder
    from megatron_pp_ext.schedule.costs import CostModel, Costs
    from megatron_pp_ext.schedule.placement import Placement
    from megatron_pp_ext.schedule.simulate import Timeline

type ReadRequest = Callable[[RequestedJob], Request]
"""Returns what a job requests; ValueError, in one line, if that cannot be."""

type Rows = Callable[[], int]
"""Returns the rows of the model's embedding; ValueError, in one line, where nothing states them."""

type Checks = Callable[[Any], None]
"""The checks that a model's config makes of itself: its ``__post_init__``."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of ``megatron_pp_ext.install`` that is a feature's, and has a flag of the same name.

    ``read`` gets the request, the value and the memory limit of the call, and returns the request with what
    the value requests; ValueError, in one line, if that cannot be.  Where ``has_limit`` of a value is true,
    the memory limit is the feature's under schedules that have none.
    """

    name: str
    read: Callable[[Request, Any, float | str | None], Request]
    has_limit: Callable[[Any], bool] = lambda value: False


@dataclass(frozen=True, slots=True)
class OtherSums:
    """The effect of ``flag`` on the sums of a job's gradients, and ``why``.

    ``fp32`` is how much a gradient of the first step may differ from stock's, relative to its largest number,
    and ``lower`` the same where the job trains in a lower precision.
    """

    flag: str
    why: str
    fp32: float
    lower: float


class Feature:
    """A feature that adds nothing.

    ``name`` is also that of the topic of its rules.  ``flags`` is the table of its flags, as
    ``job/our_flags.toml`` has them, and ``left_open`` are the arguments of those of which a search chooses an
    ``auto``.  ``asks`` are the arguments by which a job asks for the feature; where it names some, the rules
    of the feature hold only for jobs that give one of them.  ``sums`` are what its flags change in the order
    of sums.  ``refuses_models`` is whether a model that is built, and trains without flags, is held against
    the rules of the feature too, and ``refuses_calls`` whether arguments of ``install`` are, before there is
    a model.
    """

    name: ClassVar[str] = ""
    flags: ClassVar[Path | None] = None
    left_open: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[tuple[OtherSums, ...]] = ()
    refuses_models: ClassVar[bool] = False
    refuses_calls: ClassVar[bool] = False

    # The job: what is asked, and what cannot be.

    def is_asked(self, job: RequestedJob) -> bool:
        """Whether ``job`` may ask for the feature; where it does not, the rules are not imported."""
        values = map(job.argument, self.asks)
        return not self.asks or any(value is not None and value is not False for value in values)

    def read(self, job: RequestedJob, request: Request) -> Request:
        """Return ``request`` with what the flags ask for; ValueError, in one line, if that cannot be."""
        return request

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of ``install``."""
        return ()

    def as_flags(self, request: Request) -> Mapping[str, Any]:
        """Return the flags that would request the same, by the names of their arguments."""
        return {}

    def permitted(self, job: RequestedJob) -> Mapping[str, Any]:
        """Return the values of the flags ``left_open`` as the other flags permit them."""
        return {name: job.value(name) for name in self.left_open}

    def chosen(
        self, job: RequestedJob, read: ReadRequest, rows: Rows, memory: float | None = None
    ) -> Mapping[str, Any]:
        """Return the flags that are open, by the names of their arguments, as the model's costs decide.

        ``memory`` are the bytes of a device, the same on all ranks; None where nobody knows them.
        It is empty where none is open.  ValueError, in one line, where no value is possible.
        """
        return {}

    def rules(self) -> tuple[Rules, ...]:
        """Return the rules about combinations that the feature does not allow."""
        return ()

    # The order.

    def order(self, request: Request, costs: CostModel, before: Make) -> Made:
        """Return the schedule of ``request`` with the feature, where the request asks for it.

        This is a pass of ``compiler.make``: ``before`` makes the schedule by the features before this one,
        also for another number of microbatches or within other limits.
        """
        return before(request)

    def completed(self, request: Request, result: Made) -> Made:
        """Return the ``result`` of all passes with the feature's last changes."""
        return result

    def counted(self, request: Request, costs: Costs) -> Costs:
        """Return the ``costs`` by which the compiler orders ``request``.

        They are without those of a feature that the request has not.
        """
        return costs

    def compiled(
        self, timeline: Timeline, origin: str, cuts: Sequence[Cut]
    ) -> Iterable[tuple[Timeline, str]]:
        """Return orders that compete with the compiler's ``timeline``, and their origins in words.

        ``origin`` is that of ``timeline``, and ``cuts`` are the placements that
        were searched, with their costs and limits.
        The orders are simulated schedules that are named "flex".
        """
        return ()

    # A rank's step.

    def extension(self, order: RankOrder) -> Extension | None:
        """Return the feature's part of the plan of a rank; None where ``order`` does not use it."""
        return None

    # A model of Megatron.

    def hooked(self) -> tuple[ModuleType, ...]:
        """Return the modules with the feature's hooks (``megatron.patching.hook``)."""
        return ()

    def require_possible(self, request: Request) -> None:
        """Raise ValueError for what ``request`` asks for and this machine lacks.

        No process group exists at that time.
        """

    def config_checks(self, checks: Checks) -> Checks:
        """Return the checks that models' configs make of themselves, by Megatron's ``checks``."""
        return checks

    def finish_chunks(self, chunks: Sequence[Any], pipeline: Pipeline) -> None:
        """Change the chunks of this rank in place; all ranks of the pipeline do so at the same time.

        That is before data parallelism wraps the chunks and before tied weights become equal.
        """

    def model_option(self, model: Sequence[Any], placement: Placement) -> Option | None:
        """Return the option that the chunks of ``model`` add to requests for its schedules, or None.

        It must be the same on all ranks of the job, and can be hashed.
        """
        return None

    def data_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        """Return the parts that read a step's data ahead, and may give the step another plan.

        It comes before the ``step_parts`` of all features, which look at both.
        """
        return ()

    def step_parts(self, pipeline: Pipeline) -> Iterable[StepPart]:
        """Return the feature's parts of all steps of one runner.

        All ranks of the job call it at the same time.
        """
        return ()

    def guide(self, pipeline: Pipeline) -> Guide | None:
        """Return the guide that changes schedules of ``pipeline`` by records of its steps, or None."""
        return None

    # Estimates and searches.

    def addition(self) -> Addition | None:
        """Return the feature's part in the estimates of steps."""
        return None

    def variants(self) -> Variants | None:
        """Return what a search may try in addition, everywhere or where memory keeps a candidate out."""
        return None
