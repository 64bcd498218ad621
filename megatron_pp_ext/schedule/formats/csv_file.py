"""Schedules as files: the compute-only CSV of torch.distributed.pipelining.

A row is a rank, a cell is an action (``3F0``: stage 3, forward, microbatch 0), an empty cell is an idle
slot, and a line without actions is no rank.  The file holds no placement and no count of microbatches; both
follow from the cells.  A pair is the cell ``(3F0;4B1)OVERLAP_F_B``, as torch writes it.  torch also writes
cells for messages and for sharded parameters: a file with those is refused, because this project derives
messages from the order itself.  torch in turn refuses the cells of a split head: ``2S0`` and ``2T0``
are the part of the output layer, for microbatch 0, of the rank whose first stage is 2.
"""

import csv
import io
import re
from itertools import chain
from pathlib import Path

from megatron_pp_ext.files import read_text, write_whole
from megatron_pp_ext.schedule.actions import OF_STAGES, Action, Kind, Schedule, together
from megatron_pp_ext.schedule.check import InvalidSchedule, check
from megatron_pp_ext.schedule.placement import Placement, Shape

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_OF_TORCH = re.compile(r"[0-9]+((WAIT_)?(SEND|RECV)_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)[0-9]*")
"""Kinds of cells that only torch's ``compute_comms`` files have."""

_CELL = re.compile(r"([0-9]{1,6})([FIWBST])([0-9]{1,6})")


def write(schedule: Schedule, path: str | Path) -> None:
    """Write ``schedule`` to ``path``, one row for each rank, without idle cells."""
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows(
        map(_cell, together(order, schedule.paired)) for order in schedule.orders
    )
    write_whole(Path(path), rows.getvalue())


def read(path: str | Path) -> Schedule:
    """Read and check the schedule in ``path``; its name is the file's, without the suffix.

    Raises ValueError, naming row and cell (both from 0: a row is a rank), for anything that is
    not an action, and InvalidSchedule, naming the file, for a schedule that could not run.
    """
    path = Path(path)
    try:
        lines = io.StringIO(read_text(path), newline="")
        rows = [row for row in csv.reader(lines, strict=True) if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8: save the schedule as plain text"
        ) from None
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV file ({error}): write cells such as 3F0,3B0") from None
    read_rows = [
        [_actions(path, row, cell, text.strip()) for cell, text in enumerate(cells) if text.strip()]
        for row, cells in enumerate(rows)
    ]
    orders = tuple(tuple(chain.from_iterable(cells)) for cells in read_rows)
    paired = frozenset(first for cells in read_rows for first, *second in cells if second)
    if not any(orders):
        raise ValueError(f"{path}: no actions found: write a row a rank with cells such as 3F0,3B0")
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    schedule = Schedule(path.stem, _placement(path, orders), microbatches, orders, paired)
    try:
        check(schedule)
    except InvalidSchedule as error:
        raise InvalidSchedule(f"{path}: {error}") from None
    return schedule


def _cell(actions: tuple[Action, ...]) -> str:
    return str(actions[0]) if len(actions) == 1 else f"({';'.join(map(str, actions))})OVERLAP_F_B"


def _actions(path: Path, row: int, cell: int, text: str) -> tuple[Action, ...]:
    pair = _PAIR.fullmatch(text)
    parts = pair.groups() if pair else (text,)
    actions = tuple(_action(path, row, cell, text, part.strip()) for part in parts)
    return tuple(sorted(actions, key=lambda action: action.kind is not Kind.F))


def _action(path: Path, row: int, cell: int, text: str, part: str) -> Action:
    match = _CELL.fullmatch(part)
    if match is None and _OF_TORCH.fullmatch(part):
        raise ValueError(
            f"{path}: row {row}, cell {cell}: {text!r} is of torch's compute_comms files, but here messages "
            "follow from the order, and Megatron reduces gradients: write the file as compute_only"
        )
    if match is None:
        raise ValueError(
            f"{path}: row {row}, cell {cell}: {text!r} is not an action: "
            "write stage, one of F I W B S T and microbatch, such as 3F0, or (3F0;4B1)OVERLAP_F_B"
        )
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def _placement(path: Path, orders: tuple[tuple[Action, ...], ...]) -> Placement:
    """Return the placement under which every rank holds exactly the stages that its row names."""
    held_stages = [
        tuple(sorted({action.stage for action in order if action.kind in OF_STAGES})) for order in orders
    ]
    shares = any(action.kind not in OF_STAGES for order in orders for action in order)
    ranks, chunks = len(held_stages), len(held_stages[0])
    shapes = {1: [Shape.LINEAR], 2: [Shape.LOOP, Shape.V]}.get(chunks, [Shape.LOOP, Shape.WAVE])
    if chunks:
        for shape in shapes:
            placement = Placement(shape, ranks, chunks, shares)
            for candidate in (placement, placement.turned_over) if placement.folds else (placement,):
                if all(stages == candidate.stages_of(rank) for rank, stages in enumerate(held_stages)):
                    return candidate
    rows = ", ".join(f"row {rank} holds {list(stages)}" for rank, stages in enumerate(held_stages[:4]))
    raise ValueError(
        f"{path}: the stages of the rows fit no placement ({rows}{', ...' if ranks > 4 else ''}): "
        "place them linear, loop, v or wave"
    )
