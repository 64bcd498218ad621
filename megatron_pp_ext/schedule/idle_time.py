"""The causes of the idle time of every rank in a recorded step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_pp_ext.schedule.actions import delivers, needs
from megatron_pp_ext.schedule.recorded import Measured, RankRecord, RecordedStep, Reduction


class Gap(NamedTuple):
    """The time from the end of one action of a rank to the start of its next.

    Where the next one needs the output of another rank, ``sent`` is the end of the action that made it;
    otherwise it is None.  ``since`` is None before the rank's first action.
    """

    since: float | None
    until: float
    sent: float | None


class Idle(NamedTuple):
    """The seconds in which a rank did nothing, by cause.

    ``warm_up`` is the time before its first action and ``cool_down`` the time after its last one, less the
    ``reductions`` of gradients that were still running then.  In between, ``unfinished_stages`` is the time
    in which the action on another rank that it waited for had not ended, and ``late_messages`` the time from
    then on.  ``overhead`` is the rest, in which it needed no message.
    """

    warm_up: float
    cool_down: float
    unfinished_stages: float
    late_messages: float
    reductions: float
    overhead: float


def gaps(step: RecordedStep) -> list[list[Gap]]:
    """Return the gaps of every rank, one before each of its actions."""
    placement = step.placement
    ended = {delivers(event.action): event.end for record in step.records for event in record.events}

    def of_rank(rank: int, events: Sequence[Measured]) -> Iterator[Gap]:
        since = None
        for action, start, end, *_ in events:
            sent = [
                ended[need]
                for need in needs(action, placement)
                if need in ended and placement.rank_of(need.stage) != rank
            ]
            # The second action of a pair begins with the first.
            yield Gap(since, start if since is None else max(start, since), max(sent, default=None))
            since = end if since is None else max(end, since)

    return [list(of_rank(rank, record.events)) for rank, record in enumerate(step.records)]


def message_seconds(step: RecordedStep) -> list[float]:
    """Return the seconds under way of every message that was sent while its receiver was idle.

    A receiver that was busy may have taken the message long after it arrived, so others do not count.  Where
    the clocks of two ranks differ, some of the times are negative.
    """
    return [
        gap.until - gap.sent
        for rank in gaps(step)
        for gap in rank
        if gap.sent is not None and (gap.since is None or gap.since <= gap.sent)
    ]


def idle_times(step: RecordedStep) -> list[Idle]:
    """Return the idle time of each rank by cause; the parts sum up to all its idle time in the step.

    The step lasts from the first start of an action of any rank to the last end of an action or reduction.
    """
    start, end = extent(step)
    return [
        _idle(record, own_gaps, start, end) for record, own_gaps in zip(step.records, gaps(step), strict=True)
    ]


def extent(step: RecordedStep) -> tuple[float, float]:
    """Return the times at which the step began and ended, reductions of gradients included."""
    begins = [record.events[0].start for record in step.records if record.events]
    ends = [record.events[-1].end for record in step.records if record.events]
    ends += [reduction.end for record in step.records for reduction in record.reductions]
    return min(begins), max(ends)


def _idle(record: RankRecord, own_gaps: Sequence[Gap], start: float, end: float) -> Idle:
    unfinished = late = overhead = 0.0
    for since, until, sent in own_gaps:
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
    warm_up = own_gaps[0].until - start
    return Idle(warm_up, end - last - reductions, unfinished, late, reductions, overhead)


def _covered(reductions: Sequence[Reduction], since: float, until: float) -> float:
    """Return the seconds between ``since`` and ``until`` in which any of ``reductions`` was running."""
    covered = 0.0
    for _, begin, end in sorted(reductions, key=lambda reduction: reduction.start):
        end = min(end, until)
        covered += max(0.0, end - max(begin, since))
        since = max(since, end)
    return covered
