"""What the ranks of a recorded step waited for, and where their idle time came from."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import delivers, needs
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, Reduction


class Wait(NamedTuple):
    """From the end of one action of a rank to the start of its next.

    ``sent`` is when the action of another rank ended whose output the next one needs; None if it needs
    none.  ``since`` is None before the rank's first action.
    """

    since: float | None
    until: float
    sent: float | None


class Idle(NamedTuple):
    """Seconds in which a rank did nothing, by what it waited for.

    ``warm_up`` is before its first action and ``cool_down`` after its last, less the ``reductions`` of
    gradients that were still on their way then.  In between, a rank waits in ``unfinished_stages`` as long
    as the action that it needs on another rank has not ended, and in ``late_messages`` from then on.
    ``overhead`` is what is left: no message was needed.
    """

    warm_up: float
    cool_down: float
    unfinished_stages: float
    late_messages: float
    reductions: float
    overhead: float


def waits(step: RecordedStep) -> list[list[Wait]]:
    """The waits of every rank, one before each of its actions."""
    placement = step.placement
    ended = {delivers(event.action): event.end for record in step.records for event in record.events}

    def of_rank(rank: int, events: Sequence[Measured]) -> Iterator[Wait]:
        since = None
        for action, start, end, _ in events:
            sent = [
                ended[need]
                for need in needs(action, placement)
                if need in ended and placement.rank_of(need.stage) != rank
            ]
            yield Wait(since, start, max(sent, default=None))
            since = end

    return [list(of_rank(rank, record.events)) for rank, record in enumerate(step.records)]


def flights(step: RecordedStep) -> list[float]:
    """Seconds under way of every message that found its receiver idle; others may have lain about.

    Clocks that are not quite together make some of them negative.
    """
    return [
        wait.until - wait.sent
        for rank in waits(step)
        for wait in rank
        if wait.sent is not None and (wait.since is None or wait.since <= wait.sent)
    ]


def idle_times(step: RecordedStep) -> list[Idle]:
    """Where each rank's idle time came from, in the step's whole length: the parts sum up to it.

    The step goes from the first start of an action of any rank to the last end of an action or reduction.
    """
    start, end = extent(step)
    return [
        _idle(record, ranks_waits, start, end)
        for record, ranks_waits in zip(step.records, waits(step), strict=True)
    ]


def extent(step: RecordedStep) -> tuple[float, float]:
    """When the step began and ended, reductions of gradients included."""
    begins = [record.events[0].start for record in step.records if record.events]
    ends = [record.events[-1].end for record in step.records if record.events]
    return min(begins), max(*ends, *(r.end for record in step.records for r in record.reductions))


def _idle(record: RankRecord, ranks_waits: Sequence[Wait], start: float, end: float) -> Idle:
    unfinished = late = overhead = 0.0
    for since, until, sent in ranks_waits:
        if since is None:
            continue
        if sent is None:
            overhead += until - since
            continue
        arrival = min(max(since, sent), until)
        unfinished += arrival - since
        late += until - arrival
    last = record.events[-1].end
    reductions = _covered(record.reductions, last, end)
    warm_up = ranks_waits[0].until - start
    return Idle(warm_up, end - last - reductions, unfinished, late, reductions, overhead)


def _covered(reductions: Sequence[Reduction], since: float, until: float) -> float:
    """The seconds between ``since`` and ``until`` in which some of ``reductions`` were on their way."""
    covered = 0.0
    for _, begin, end in sorted(reductions, key=lambda reduction: reduction.start):
        end = min(end, until)
        covered += max(0.0, end - max(begin, since))
        since = max(since, end)
    return covered
