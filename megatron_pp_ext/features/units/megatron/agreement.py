"""The lengths by which all ranks that meet in a step plan it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.integration.runners.model_stage import StepInputs

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
    """The lengths of a microbatch cannot be told from what the data iterator has yielded."""


class Agreed(NamedTuple):
    """What all ranks plan by: the lengths of this pipeline's own data, and those to plan by.

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


class _Report(NamedTuple):
    """What is known of one pipeline's data: its lengths, or a problem that ends the step.

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
    """Return what all ranks that meet in the step plan by; collective over their groups.

    ``read`` reads this rank's data ahead and returns the lengths, None where the rank is given no data.  It
    raises UnknownLengths where these cannot be told.  The ranks of a pipeline have the same data, and ranks
    without data take the lengths of others.  Pipelines that share experts have data of their own: they plan
    by the heaviest microbatch in each place.  ``sizes`` returns those of what is read, and ``are_trusted`` is
    whether this rank trusts them.

    RuntimeError, the same on all ranks that meet, where one of them cannot read its data, where the ranks of
    a pipeline read different lengths, and where none has data.  The rank whose data raised something else
    raises that, as it would without an order.
    """
    report, error = _report(read, sizes, _Report(inputs.group.rank(), are_trusted))
    for name in _PIPELINE:
        report = _of_pipeline(_gathered(report, getattr(inputs.groups, name, None)))
    if not _knows(report):
        report = report._replace(
            problem=(
                "no rank of this pipeline has a data iterator, and an order of microbatches is planned by "
                "their lengths; leave the order out"
            ),
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


def of_all(own: Documents, inputs: StepInputs) -> tuple[Documents, ...]:
    """Return the lengths of all pipelines that share experts with this one, each once and in one order.

    Collective over the groups of those that meet, where experts are shared.
    """
    return tuple(sorted(_of_experts({own}, inputs)))


def seen_by_any[T](seen: set[T], inputs: StepInputs) -> set[T]:
    """Return what any rank of those that meet in a step has ``seen``; collective over their groups."""
    for name in _PIPELINE:
        seen = set().union(*_gathered(seen, getattr(inputs.groups, name, None)))
    return _of_experts(seen, inputs)


def _of_experts[T](found: set[T], inputs: StepInputs) -> set[T]:
    """Return what all pipelines that share experts with this one have found, whose ranks have the same."""
    if any(_size(getattr(inputs.groups, name, None)) > 1 for name in _EXPERTS):
        for name in (*_EXPERTS, *_PIPELINE):
            found = set().union(*_gathered(found, getattr(inputs.groups, name, None)))
    return found


def _report(
    read: Callable[[], Documents | None], sizes: Callable[[], Sizes], without_data: _Report
) -> tuple[_Report, Exception | None]:
    """Return what a rank knows of its data, and what that has raised itself."""
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


def _knows(report: _Report) -> bool:
    return report.documents is not None or bool(report.problem or report.unknown)


def _of_pipeline(reports: Sequence[_Report]) -> _Report:
    """Return the one report of ranks with the same data; a problem where they differ.

    Sizes on which these do not agree are not known.
    """
    known = sorted(filter(_knows, reports), key=lambda one: one.rank)
    if not known:
        return reports[0]
    for one in known:
        if one.problem:
            return one
    for one in known:
        if one.unknown:
            return one
    first = known[0]
    other = next((one for one in known if one.documents != first.documents), None)
    if other is None:
        sizes = {one.sizes for one in known if one.sizes}
        return first._replace(
            sizes=sizes.pop() if len(sizes) == 1 else (),
            are_trusted=all(one.are_trusted for one in reports),
        )
    return first._replace(
        problem=(
            f"pipeline ranks {first.rank} and {other.rank} read microbatches of different lengths in this "
            "step; give all ranks of a pipeline the same data, or leave the order out"
        ),
    )


def _of_several(reports: Sequence[_Report], work: Work) -> _Report:
    """Return the report of pipelines with data of their own: the heaviest microbatch in each place."""
    for one in reports:
        if one.problem or one.unknown:
            return one
    found = [one.documents for one in reports if one.documents is not None]
    counts = dict.fromkeys(map(len, found))
    if len(counts) > 1:
        return reports[0]._replace(
            problem=(
                f"pipelines that share experts have {' and '.join(map(str, counts))} microbatches in this "
                "step; give all of them as many"
            ),
        )
    are_trusted = all(one.are_trusted for one in reports)
    return reports[0]._replace(documents=_heaviest(found, work), are_trusted=are_trusted)


def _heaviest(some: Sequence[Documents], work: Work) -> Documents:
    """Return the heaviest microbatch in each place."""
    seconds = [work(Microbatches(documents)) for documents in some]
    best = (max(range(len(some)), key=lambda at: seconds[at][place]) for place in range(len(some[0])))
    return tuple(some[at][place] for place, at in enumerate(best))


def _gathered[T](own: T, group: dist.ProcessGroup | None) -> list[T]:
    if _size(group) == 1:
        return [own]
    gathered: list[Any] = [None] * _size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
