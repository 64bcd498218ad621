"""The lengths of a step's microbatches, on which all its ranks agree, and the shapes of messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Ordering
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import Step, StepPart
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import shapes_of
from megatron_pp_ext.runtime.channels import OtherShape, Shape
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.schedule.actions import Announced, Schedule

type Documents = tuple[tuple[int, ...], ...]
"""The document lengths of each microbatch."""

type Sizes = tuple[tuple[int, int], ...]
"""How many sequences each microbatch has, and of how many tokens each; empty where that is not known."""

type Work = Callable[[Microbatches], list[float]]
"""Returns how long each microbatch of a step takes."""

_PIPELINE = "tp", "cp", "pp"
_EXPERTS = "ep", "expt_tp"
"""Megatron's names of the groups whose ranks have the same data, and of those that share experts."""


class UnknownLengths(ValueError):
    """The lengths of a microbatch do not follow from the items of the data iterator."""


class Agreed(NamedTuple):
    """The lengths of this pipeline's data, and those by which all ranks plan.

    The two differ where pipelines share experts.  ``unknown`` is why no lengths are known, on any of the
    ranks; then both are empty.  ``sizes`` are those of the pipeline's own data, and ``are_trusted`` whether
    all ranks know theirs and trust them: pipelines that share experts announce shapes together, since their
    ranks launch in one order.
    """

    own: Documents = ()
    planned: Documents = ()
    unknown: str = ""
    sizes: Sizes = ()
    are_trusted: bool = False


class _DataReport(NamedTuple):
    """The lengths of one pipeline's data, or a problem that ends the step.

    ``rank`` is the pipeline rank that it comes from.  A rank that is given no data has no ``documents``.
    """

    rank: int
    are_trusted: bool
    documents: Documents | None = None
    sizes: Sizes = ()
    problem: str = ""
    unknown: str = ""


def agree(
    read: Callable[[], Documents | None],
    inputs: StepInputs,
    work: Work,
    sizes: Callable[[], Sizes] = tuple,
    are_trusted: bool = False,
) -> Agreed:
    """Agree on the lengths by which all ranks of the step plan; collective over their groups.

    ``read`` reads this rank's data ahead and returns the lengths, None where the rank is given no data.  It
    raises UnknownLengths where these do not follow.  The ranks of a pipeline have the same data, and ranks
    without data take the lengths of others.  Pipelines that share experts have data of their own: they plan
    by the heaviest microbatch in each place.  ``sizes`` returns those of what is read, and ``are_trusted`` is
    whether this rank trusts them.

    RuntimeError, the same on all ranks that meet, where one of them cannot read its data, where the ranks of
    a pipeline read different lengths, and where none has data.  The rank whose data raised something else
    raises that, as it would without an order.
    """
    report, error = _report(read, sizes, _DataReport(inputs.group.rank(), are_trusted))
    for name in _PIPELINE:
        report = _of_pipeline(_gathered(report, getattr(inputs.groups, name, None)))
    if not _knows(report):
        report = report._replace(
            problem=(
                "no rank of this pipeline has a data iterator, and an order of microbatches is planned by "
                "their lengths; leave the order out"
            )
        )
    report = report._replace(are_trusted=report.are_trusted and bool(report.sizes))
    planned = report
    if any(_size(getattr(inputs.groups, name, None)) > 1 for name in _EXPERTS):
        for name in (*_EXPERTS, *_PIPELINE):
            planned = _of_several(_gathered(planned, getattr(inputs.groups, name, None)), work)
    if error is not None:
        raise error
    if planned.problem:
        raise RuntimeError(planned.problem)
    if planned.unknown:
        return Agreed(unknown=planned.unknown)
    assert report.documents is not None and planned.documents is not None
    return Agreed(report.documents, planned.documents, "", report.sizes, planned.are_trusted)


def of_all(documents: Documents, inputs: StepInputs) -> tuple[Documents, ...]:
    """Return the lengths of all pipelines that share experts with this one, each once and in one order.

    Collective over the groups of those that meet, where experts are shared.
    """
    return tuple(sorted(_of_experts({documents}, inputs)))


def seen_by_any[T](seen: set[T], inputs: StepInputs) -> set[T]:
    """Return all that ranks of a step have ``seen``; collective over their groups."""
    for name in _PIPELINE:
        seen = set().union(*_gathered(seen, getattr(inputs.groups, name, None)))
    return _of_experts(seen, inputs)


def _of_experts[T](values: set[T], inputs: StepInputs) -> set[T]:
    """Return the ``values`` of all pipelines that share experts with this one; its ranks have the same."""
    if any(_size(getattr(inputs.groups, name, None)) > 1 for name in _EXPERTS):
        for name in (*_EXPERTS, *_PIPELINE):
            values = set().union(*_gathered(values, getattr(inputs.groups, name, None)))
    return values


def _report(
    read: Callable[[], Documents | None], sizes: Callable[[], Sizes], without_data: _DataReport
) -> tuple[_DataReport, Exception | None]:
    """Return a rank's report on its data, and the exception that the data raised."""
    try:
        documents = read()
    except UnknownLengths as error:
        return without_data._replace(unknown=str(error)), None
    except RuntimeError as error:
        return without_data._replace(problem=str(error)), error
    except Exception as error:  # whatever a loader raises, the other ranks must not wait
        line = f"the data of pipeline rank {without_data.rank} raised {type(error).__name__}: {error}"
        return without_data._replace(problem=line), error
    if documents is None:
        return without_data, None
    return without_data._replace(documents=documents, sizes=sizes()), None


def _knows(report: _DataReport) -> bool:
    return report.documents is not None or bool(report.problem or report.unknown)


def _of_pipeline(reports: Sequence[_DataReport]) -> _DataReport:
    """Return the one report of ranks with the same data; a problem where they differ.

    Sizes on which these do not agree are not known.
    """
    informed = sorted(filter(_knows, reports), key=lambda report: report.rank)
    if not informed:
        return reports[0]
    for report in informed:
        if report.problem:
            return report
    for report in informed:
        if report.unknown:
            return report
    first = informed[0]
    other = next((report for report in informed if report.documents != first.documents), None)
    if other is None:
        sizes = {report.sizes for report in informed if report.sizes}
        return first._replace(
            sizes=sizes.pop() if len(sizes) == 1 else (),
            are_trusted=all(report.are_trusted for report in reports),
        )
    return first._replace(
        problem=(
            f"pipeline ranks {first.rank} and {other.rank} read microbatches of different lengths in this "
            "step; give all ranks of a pipeline the same data, or leave the order out"
        )
    )


def _of_several(reports: Sequence[_DataReport], work: Work) -> _DataReport:
    """Return the report of pipelines with data of their own: the heaviest microbatch in each place."""
    for report in reports:
        if report.problem or report.unknown:
            return report
    documents = [report.documents for report in reports if report.documents is not None]
    counts = dict.fromkeys(map(len, documents))
    if len(counts) > 1:
        return reports[0]._replace(
            problem=(
                f"pipelines that share experts have {' and '.join(map(str, counts))} microbatches in this "
                "step; give all of them as many"
            )
        )
    are_trusted = all(report.are_trusted for report in reports)
    return reports[0]._replace(documents=_heaviest(documents, work), are_trusted=are_trusted)


def _heaviest(some: Sequence[Documents], work: Work) -> Documents:
    """Return the heaviest microbatch in each place."""
    seconds = [work(Microbatches(documents)) for documents in some]
    best = (max(range(len(some)), key=lambda at: seconds[at][place]) for place in range(len(some[0])))
    return tuple(some[at][place] for place, at in enumerate(best))


def _gathered[T](value: T, group: dist.ProcessGroup | None) -> list[T]:
    if _size(group) == 1:
        return [value]
    gathered: list[Any] = [None] * _size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


_ROWS = "tokens", "input_ids", "labels", "position_ids"
"""The names of tensors with a row for each sequence, and a column for each token."""


class KnownShapes:
    """Hands over the shapes of messages ahead, once a step has shown that they follow from batches.

    A loop may pad what it reads, or put something between.  So a step whose messages announce their shapes
    shows first whether all of them follow from the tensors that were read; then those of later steps are
    taken to do so too, on all ranks of the pipeline.
    """

    def __init__(self) -> None:
        self._follow: bool | None = None

    @property
    def are_trusted(self) -> bool:
        """Whether this rank has seen that shapes follow from batches."""
        return bool(self._follow)

    @staticmethod
    def known_sizes(inputs: StepInputs, data: Sequence[Sequence[Any] | None]) -> Sizes:
        """Return the sizes of a step's microbatches, as ``sizes_of``; empty where no shapes follow."""
        sizes = sizes_of(data)
        return sizes if shapes_of(inputs, sizes) else ()

    @staticmethod
    def are_announced(inputs: StepInputs, agreed: Agreed) -> bool:
        """Return whether messages of a step announce their shapes."""
        return not inputs.shape and not agreed.are_trusted

    @contextmanager
    def step(self, inputs: StepInputs, agreed: Agreed, order: Sequence[int]) -> Iterator[None]:
        """Surround a step whose microbatches run in this ``order``.

        RuntimeError where a stage makes a message of another shape than was handed over.
        """
        followed = () if inputs.shape else shapes_of(inputs, agreed.sizes)
        shapes = [followed[number] for number in order] if followed else []
        if not self.are_announced(inputs, agreed):
            inputs.shapes = shapes
        try:
            yield
        except OtherShape as error:
            if not inputs.shapes:
                raise
            raise RuntimeError(
                f"{error}, or keep the order of the data (order='given'), whose messages announce their "
                "shapes: in the first steps all shapes followed from the batches"
            ) from error
        if not shapes or self._follow is not None or inputs.announced is None:
            return
        # Equal shapes tell nothing of how others would be padded.
        if inputs.announced != {number: {shape} for number, shape in enumerate(shapes)}:
            self._follow = False
        elif len(set(shapes)) > 1:
            self._follow = True


def sizes_of(data: Sequence[Sequence[Any] | None]) -> Sizes:
    """Return the sizes of the microbatches of a step, from the ``data`` of each chunk that reads some."""
    first = next((batches for batches in data if batches is not None), ())
    sizes = [size_of(batch) for batch in first]
    return tuple(size for size in sizes if size is not None) if None not in sizes else ()


def size_of(batch: Any) -> tuple[int, int] | None:
    """Return how many sequences a batch has, and of how many tokens each; None where it has no such rows."""
    for name in _ROWS if isinstance(batch, Mapping) else ():
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_nested:
            rows, tokens = value.shape
            return rows, tokens
    return None


type _Key = tuple[int, bool, Announced]


def announcing(pipeline: Pipeline) -> StepPart:
    """Return the part by which messages of ``pipeline`` announce their shapes, in steps that know none.

    An order that somebody has asked to be the data's takes no shape for granted.
    """
    ordering = pipeline.request.option(Ordering)
    is_given = ordering is not None and ordering.how == "given"
    return AnnouncedShapes(may_repeat=not is_given and pipeline.placement.chunks > 1).step


class AnnouncedShapes:
    """Posts receives of announced messages late; with ``may_repeat`` it learns which can announce nothing.

    The host of a rank that posts the receive of an announced message stops until its sender is there.  So
    such receives are posted late (``schedule.launch_order``).  And where a rank has several stages, a
    microbatch announces its shape to it only once, as soon as a step has shown that all stages hand on one
    shape.
    """

    def __init__(self, may_repeat: bool) -> None:
        self._has_one_shape: bool | None = None if may_repeat else False
        self._seen: set[bool] | None = None
        self._plans: dict[_Key, tuple[Schedule, RankPlan]] = {}

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Surround a step; one whose shapes are known is left alone.

        RuntimeError where a stage hands on another shape than the stages before it.
        """
        inputs = step.inputs
        if inputs.shape:
            yield
            return
        if self._has_one_shape is None and self._seen is not None:
            self._decide(self._seen, inputs)
        inputs.has_one_shape = bool(self._has_one_shape)
        inputs.announced = {}
        step.plan = self._plan(step)
        try:
            yield
        except OtherShape as error:
            if not inputs.has_one_shape or inputs.shapes:
                raise
            raise RuntimeError(
                f"{error}, or keep the order of the data (order='given'), whose messages all announce their "
                "shapes: in the first steps each microbatch had one shape on all stages"
            ) from error
        self._seen = _shows(inputs.announced)

    def _decide(self, seen: set[bool], inputs: StepInputs) -> None:
        """Take one shape for granted if no rank saw another; collective over those that meet."""
        if answers := seen_by_any(seen, inputs):
            self._has_one_shape = False not in answers

    def _plan(self, step: Step) -> RankPlan:
        """Return the plan with late receives, which is kept for the schedule's later steps."""
        announces = step.inputs.announces
        key = step.schedule.microbatches, step.inputs.forward_only, announces
        schedule, plan = self._plans.get(key, (None, None))
        if plan is None or schedule is not step.schedule:
            plan = plan_rank(step.schedule, step.plan.rank, announced=announces)
            self._plans[key] = step.schedule, plan
        return plan


def _shows(announced: Mapping[int, set[Shape]]) -> set[bool]:
    """Return whether the messages of each microbatch had one shape; nothing where all had the same."""
    if any(len(shapes) > 1 for shapes in announced.values()):
        return {False}
    return {True} if len(set().union(*announced.values())) > 1 else set()
