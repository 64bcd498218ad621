"""Schedules from a building block (arXiv 2405.15362, sections 2 and 3, figure 3).

A building block states when one microbatch would meet every rank; a schedule repeats it, one
microbatch each period.  In the V placement a microbatch goes down and up the ranks twice, in
four legs: F of the first chunk (down), F of the second (up), I of the second (down), I of the
first (up).  A period is six ticks, one for each leg and one for each of the two W.

The block determines memory: a rank keeps a chunk from its F to its W, so the shorter that time, the
fewer microbatches are alive.  The paper turns a repeated block into a schedule in steps: squeeze
out the idle ticks, rewrite warm-up and cool-down, put W back where a rank waits.  ``unroll`` does
all of it in one run of the pipeline on paper, in which the block is not a timetable but a list of
priorities: a rank takes the most urgent action that can run, and W when there is none.
"""

from dataclasses import dataclass

from megatron_pp_ext.schedule.actions import Action, Kind

PERIOD = 6
"""Ticks a microbatch: four legs and two W on every rank."""


@dataclass(frozen=True, slots=True)
class Block:
    """One microbatch's way through the ranks, in ticks.

    ``steps`` are the ticks from rank to rank on the way down and on the way up, the same in
    forward and backward.  ``turns`` are the ticks from leg to leg: at the last rank, at rank 0
    and at the last rank again.
    """

    steps: tuple[int, int]
    turns: tuple[int, int, int]

    def starts(self, ranks: int) -> list[int]:
        """Return the ticks at which the way's 4 * ``ranks`` stations start, the first at tick 0."""
        ticks = [0]
        for leg in range(4):
            for _ in range(ranks - 1):
                ticks.append(ticks[-1] + self.steps[leg % 2])
            if leg < 3:
                ticks.append(ticks[-1] + self.turns[leg])
        return ticks


def unroll(
    block: Block, ranks: int, microbatches: int, cap: int, *, ahead: int = 0, in_turn: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Run ``microbatches`` through the V placement, one action a rank and tick; return the orders.

    A rank takes, of the legs whose input is there, the one that the block would start first, and
    else its oldest pending W.  Two rules hold forwards back.  A rank keeps at most ``cap`` chunks.
    And it has at most ``ahead`` microbatches more between its two forwards than the block has, or
    the cap could fill with microbatches that all wait to turn round.

    With ``in_turn`` only warm-up and cool-down are free to let one leg overtake another.  From a
    rank's first I of its first chunk to its last forward it keeps strictly to the block's order
    and rather does W: the order that repeats is then the block's own, and as sound as the block
    when F, I and W do not take the same time.

    Raises ValueError when ``cap`` is too low for a microbatch to get through.
    """
    starts = block.starts(ranks)
    legs = [(rank, 2 * ranks - 1 - rank, 2 * ranks + rank, 4 * ranks - 1 - rank) for rank in range(ranks)]
    between = [-(-(starts[turned] - starts[first]) // PERIOD) + ahead for first, turned, _, _ in legs]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    pending: list[list[Action]] = [[] for _ in range(ranks)]
    live = [0] * ranks
    done = [0] * (4 * ranks)

    def can_run(rank: int, station: int, arrived: int) -> bool:
        if done[station] == arrived:
            return False
        if station >= 2 * ranks:
            return True
        first, turned, _, _ = legs[rank]
        if station == first and done[first] - done[turned] == between[rank]:
            return False
        return live[rank] < cap

    while done[-1] < microbatches or any(pending):
        arrived = [microbatches, *done]
        idle_ranks = 0
        for rank in range(ranks):
            by_urgency = sorted(
                (starts[station] + PERIOD * done[station], station)
                for station in legs[rank]
                if done[station] < microbatches
            )
            _, turned, _, returned = legs[rank]
            if in_turn and done[returned] > 0 and done[turned] < microbatches:
                del by_urgency[1:]
            for _, station in by_urgency:
                if can_run(rank, station, arrived[station]):
                    is_forward = station < 2 * ranks
                    stage = station if is_forward else 4 * ranks - 1 - station
                    orders[rank].append(Action(stage, Kind.F if is_forward else Kind.I, done[station]))
                    if is_forward:
                        live[rank] += 1
                    else:
                        pending[rank].append(Action(stage, Kind.W, done[station]))
                    done[station] += 1
                    break
            else:
                if pending[rank]:
                    orders[rank].append(pending[rank].pop(0))
                    live[rank] -= 1
                else:
                    idle_ranks += 1
        if idle_ranks == ranks:
            raise ValueError(
                f"{block} gets no microbatch through {ranks} ranks that keep {cap} chunks each: raise the cap"
            )
    return tuple(map(tuple, orders))
