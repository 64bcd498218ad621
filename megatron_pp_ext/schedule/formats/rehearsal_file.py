"""The measurements of a rehearsed rank as a file, which the rank itself writes as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from megatron_pp_ext.files import write_whole
from megatron_pp_ext.json_input import STRICT, naming, read_as
from megatron_pp_ext.schedule.costs import HeadCosts, StageCosts, as_written, in_files


class Collective(NamedTuple):
    """A collective within an action of a chunk, over a group of ``ranks`` ranks that are ``stride`` apart.

    A rank calls it while it is rehearsed, where it takes no time.
    ``kind`` is that of the action.  ``operation`` is ``all_reduce``, ``gather`` (also for a reduce-scatter)
    or ``all_to_all``.  ``size`` is the bytes of the whole tensor.
    """

    chunk: int
    kind: str
    operation: str
    size: int
    ranks: int
    stride: int


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    """The measurements of one rank.

    ``stages`` are the costs of its chunks, in seconds and bytes.  They leave out the ``collectives`` of one
    microbatch, which take no time when a rank runs alone, and messages, each of ``message_bytes``.
    ``head`` are of its part of a head that is split over the ranks.
    ``outside_seconds`` is the time between the last action of a step and the first of the next, for
    optimizer, logging and data.  ``peak_activation_bytes`` is measured by the recorder.  ``weight_bytes``,
    ``gradient_bytes`` and ``optimizer_bytes`` are the sizes of the tensors that the rank holds;
    ``device_bytes`` is the allocator's peak, None on a machine without a device.  ``layers`` has the number
    of layers of every stage of the pipeline.  ``ratios`` has a row for each timed step: the time of each
    action of the rank, in its order, divided by the one in ``stages``.  ``step_seconds`` are the seconds of
    the timed steps' pipelines.  ``waited`` is the part of its time, between its first and its last timed
    step, in which the process could run and waited for a processor, and ``load`` the machine's load average
    divided by its processors; they are None where the system does not report them.
    """

    __pydantic_config__: ClassVar = {**STRICT, "alias_generator": in_files}

    rank: int
    schedule: str
    digest: str
    layers: tuple[int, ...]
    stages: tuple[StageCosts, ...]
    collectives: tuple[Collective, ...]
    message_bytes: int
    outside_seconds: float
    peak_activation_bytes: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    device_bytes: int | None = None
    ratios: tuple[tuple[float, ...], ...] = ()
    head: HeadCosts | None = None
    step_seconds: tuple[float, ...] = ()
    waited: float | None = None
    load: float | None = None


def write(measured: RankRehearsal, path: Path) -> None:
    """Write ``measured`` to ``path``."""
    write_whole(path, json.dumps(as_written(measured)))


def read(path: Path) -> RankRehearsal:
    """Read a file that ``write`` wrote; ValueError, naming the file, for anything else."""
    with naming(path):
        return read_as(RankRehearsal, path, "rehearse again")
