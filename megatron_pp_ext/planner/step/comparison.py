"""The same job under Megatron's own schedules, shown next to a schedule's prediction.

Each alternative keeps the parallel sizes, the batch and the precision of the job.  Stages have equally many
layers in it, since a layout of the job is one for the stages of its schedule.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job import flag_table, options, pipeline
from megatron_pp_ext.job.layers import spread
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.planner.step.estimate import MARGIN, Estimate, estimate_request
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO

_MOST_ACTIONS = 30_000
"""The actions of all alternatives that are timed; a thousand take 10 to 30 milliseconds."""

_WORTH_SHARING = 0.02
"""The part of a step that a shared vocabulary has to save to be named."""

_AT_START = "h100"
"""The system by whose rates a job is estimated at its start, on whatever GPUs it runs."""

_SHARED = "pipeline_vocabulary"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A step of the job under another schedule or flag: its seconds, and the bytes of the fullest rank."""

    name: str
    step_seconds: float
    fullest_bytes: float

    def __str__(self) -> str:
        name, seconds, size = self.words
        return f"{name}: {seconds}, {size}"

    @property
    def words(self) -> tuple[str, str, str]:
        """Its name, seconds and gigabytes."""
        return self.name, f"{self.step_seconds:.4g} s", f"{self.fullest_bytes / 1e9:.1f} GB"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ``chosen`` step and its alternatives.

    ``stock`` is Megatron's 1F1B, and ``interleaved`` the shortest interleaved step that fits the device, or
    the shortest where none does.  ``shared`` is the chosen schedule with --pipeline-vocabulary auto, where
    that is left out and saves enough; a compiled schedule has none.  Each is None where the job cannot run
    it, or where it has too many actions to be timed at once.
    """

    chosen: Alternative
    stock: Alternative | None
    interleaved: Alternative | None
    shared: Alternative | None

    @property
    def steps(self) -> list[Alternative]:
        """The chosen step, and then its alternatives."""
        return [*filter(None, (self.chosen, self.stock, self.interleaved, self.shared))]

    @property
    def lines(self) -> list[str]:
        """The alternatives, a line each, and then the warnings."""
        return [*map(str, self.steps[1:]), *self.warnings]

    @property
    def warnings(self) -> list[str]:
        """Warnings where Megatron's own schedules are better: 1F1B in time, interleaved at no more bytes."""
        lines = []
        job = self.chosen
        for other in (self.stock, self.interleaved):
            if other is None or other.step_seconds >= job.step_seconds:
                continue
            saved = other.fullest_bytes - job.fullest_bytes
            if other is self.interleaved and saved > 0:
                continue
            memory = f"{abs(saved) / 1e9:.1f} GB {'less' if saved > 0 else 'more'}"
            slower = job.step_seconds / other.step_seconds - 1
            lines.append(
                f"warning: {job.name} is predicted to take {slower:.1%} longer than {other.name}, and "
                f"{memory} on the fullest rank"
            )
        return lines

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return {**asdict(self), "warnings": self.warnings}


def compared(
    job: RequestedJob, machine: System, data: int, estimated: Estimate, margin: float = MARGIN
) -> Comparison | None:
    """Return the step ``estimated`` for ``job`` on ``data`` data-parallel ranks, next to others.

    The job has a ``vocab_size``.  None where there is no pipeline, where the job runs Megatron's own schedule
    as it is, and where it has no step to compare, since its schedule never flushes.
    """
    schedule, ranks = job.pipeline.pipeline_schedule, job.parallel.pipeline_model_parallel_size
    if ranks == 1 or _is_stock(job) or not catalog.abilities(schedule).flushes:
        return None
    names = [flag.removeprefix("--").replace("-", "_") for flag in flag_table.flags()]
    plain = job.with_arguments(
        **{name: None for name in names if name != "pipeline_costs"},
        pipeline_model_parallel_layout=None,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
    )
    timed = _StepEstimates(machine, data, margin)
    stock = timed.step(plain, "stock 1F1B")
    shared = None
    # Compiling another order takes longer than all else here.
    if job.value(_SHARED) is None and not catalog.abilities(schedule).is_compiled:
        shared = timed.step(job.with_arguments(**{_SHARED: AUTO}), "with --pipeline-vocabulary auto")
        if shared and shared.step_seconds > (1 - _WORTH_SHARING) * estimated.step_seconds:
            shared = None
    fitting = [
        step
        for chunks in _chunks(job, ranks)
        if (
            step := timed.step(
                plain.with_arguments(num_virtual_stages_per_pipeline_rank=chunks),
                f"stock interleaved, {chunks} chunks a rank",
            )
        )
    ]
    interleaved = min(
        fitting, key=lambda step: (step.fullest_bytes > machine.memory_bytes, step.step_seconds), default=None
    )
    assert schedule is not None
    alternative = Alternative(schedule, estimated.step_seconds, estimated.fullest.total)
    return Comparison(alternative, stock, interleaved, shared)


def at_start(job: RequestedJob, data: int, rows: Callable[[], int]) -> list[str]:
    """Return lines for a job's start that compare its step with others, by the rates of an H100.

    The step is that of ``job`` on ``data`` data-parallel ranks; ``rows`` returns the rows of the
    embedding.  Nothing where ``compared`` returns None, where the step has too many actions to be timed at
    once, and where its order would have to be compiled a second time.  ValueError for a job that cannot be
    estimated.
    """
    if job.pipeline.can.is_compiled:
        return []
    all_rules.refuse_to_plan(job)
    request = pipeline.read(job, data)
    if _actions(request) > _MOST_ACTIONS:
        return []
    job, machine = job.with_arguments(vocab_size=job.model.vocab_size or rows()), system.read(_AT_START)
    comparison = compared(job, machine, data, estimate_request(job, machine, request))
    if comparison is None:
        return []
    steps = "; ".join(map(str, comparison.steps))
    return [f"By the rates of an {_AT_START.upper()}, {steps}", *comparison.warnings]


def _is_stock(job: RequestedJob) -> bool:
    schedule = job.pipeline.pipeline_schedule
    has_feature = any(job.argument(f"pipeline_{name}") for name in options.arguments())
    return schedule is None or (schedule in pipeline.STOCK and not has_feature)


def _chunks(job: RequestedJob, ranks: int) -> Iterator[int]:
    """Yield the numbers of chunks a rank, two or more, that the layers fill evenly."""
    layers = spread(job)
    yield from (chunks for chunks in range(2, layers // ranks + 1) if layers % (ranks * chunks) == 0)


def _actions(request: Request) -> int:
    return request.finest.stages * request.microbatches * (3 if request.may_split_backward else 2)


class _StepEstimates:
    """Steps that are estimated until they have too many actions together."""

    def __init__(self, machine: System, data: int, margin: float) -> None:
        self._machine, self._data, self._margin = machine, data, margin
        self._remaining = _MOST_ACTIONS

    def step(self, job: RequestedJob, name: str) -> Alternative | None:
        """Return the step of ``job``, or None where it cannot run or has too many actions."""
        with suppress(ValueError):
            all_rules.refuse_to_plan(job)
            request = pipeline.read(job, self._data)
            if (actions := _actions(request)) <= self._remaining:
                self._remaining -= actions
                estimated = estimate_request(job, self._machine, request, self._margin)
                return Alternative(name, estimated.step_seconds, estimated.fullest.total)
        return None
