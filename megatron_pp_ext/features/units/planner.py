"""What the slices of a step cost in an estimate, what ranks keep of them, and those that a search tries."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_pp_ext.compiler.request import Option
from megatron_pp_ext.features.units.costs import of_slices, peaks_of
from megatron_pp_ext.features.units.options import Slices, job_slices, read_tokens, sizes
from megatron_pp_ext.features.units.rules import may_share
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import Candidate, UnitWork, Variants
from megatron_pp_ext.planner.step.workload import Addition
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs, UnitCosts
from megatron_pp_ext.schedule.entry import AUTO

if TYPE_CHECKING:
    from megatron_pp_ext.planner.step.workload import Workload


class Sliced(Addition):
    """The seconds of slices, and the gradients of keys and values that wait for the slices before."""

    def units(self, job: Job) -> float:
        tokens = job.pipeline.pipeline_slice_tokens
        return max(1.0, job.model.seq_length / tokens) if isinstance(tokens, int) else 1.0

    def in_step(self, work: "Workload", schedule: Schedule, costs: Costs) -> Costs:
        """See ``Addition``.

        ValueError where costs come from a file (--pipeline-costs), which is for whole sequences.
        """
        if not schedule.units:
            return costs
        if work.model.measured:
            raise ValueError(
                "--pipeline-slice-tokens needs the model's own costs, and --pipeline-costs has those of "
                "whole sequences: leave one out"
            )
        return _costs_of(work, schedule)

    def activations(
        self, work: "Workload", schedule: Schedule, peaks: tuple[float, ...]
    ) -> tuple[float, ...]:
        """See ``Addition``: those of slices, and the gradients of a sequence's keys and values."""
        if not schedule.units:
            return peaks
        return peaks_of(schedule, _costs_of(work, schedule))

    def unmeasured(self, schedule: Schedule) -> Iterator[str]:
        if schedule.units:
            yield "in slices of sequences"


def _costs_of(work: "Workload", schedule: Schedule) -> UnitCosts:
    from megatron_pp_ext.planner.step.workload import Workload

    def costs_of(job: Job) -> Costs:
        return Workload(job, work.system, work.placement, work.data, work.layers).costs

    return of_slices(costs_of, work.job, schedule.units)


MOST_ACTIONS = 50_000
"""The actions of the largest step in slices whose length is open: what these gain over longer ones is little,
and a plan of more takes seconds."""

_INTERPOLATED = 0.95
"""The part of what slices of the greatest length take that slices of equal cost have at least: theirs is
interpolated between the longest and the shortest."""

_STARTS_EARLIER = 0.8
"""The part of the longest slice after which a rank may pass on the first, which may be shorter."""


class SliceVariants(Variants):
    """Candidates in slices of sequences: those of one length, or with ``auto`` of several and whole ones."""

    label = ("slices...", "the most tokens of a slice of a sequence")
    option = Slices
    most = 2
    beyond = "in slices of a third length"

    def cuts(self, job: Job, cut: Candidate) -> Iterator[Candidate]:
        """See ``Variants``."""
        for slices in choices(job):
            if slices is None:
                yield cut
                continue
            ranks = cut.context * cut.tensor
            is_divided = not (slices.tokens or 0) % ranks and not slices.length % ranks
            if cut.pipeline > 1 and is_divided and may_share(cut.described(job)):
                yield replace(cut, options=(*cut.options, replace(slices, multiple=ranks)))

    def permits(self, job: Job, candidate: Candidate) -> bool:
        """See ``Variants``: plans of very many slices take too long for what they gain."""
        return job.pipeline.pipeline_slice_tokens != AUTO or _actions(candidate) <= MOST_ACTIONS

    def least(self, candidate: Candidate, job: Job, seconds: Callable[[Job], float]) -> UnitWork | None:
        """See ``Variants``.

        Seconds that go by squares of tokens are those of attention, which slices split among them.
        """
        slices = candidate.option(Slices)
        if slices is None or slices.tokens is None:
            return None
        length, count = job.model.seq_length, -(-job.model.seq_length // slices.tokens)
        whole, half, alone = (
            seconds(job.changed(seq_length=tokens, pipeline_slice_tokens=tokens))
            for tokens in (length, length // 2, slices.tokens)
        )
        attention = max(0.0, 2 * (whole - 2 * half))
        sequence = count * alone + (1 - 1 / count) * attention
        return UnitWork(_INTERPOLATED * sequence / whole, _STARTS_EARLIER * alone / whole)

    def in_job(self, option: Option, job: Job) -> Option:
        assert isinstance(option, Slices)
        return job_slices(job, option.tokens)

    def planned(self, option: Option, work: "Workload") -> Option:
        # Imported here because it takes numba, which an estimate of whole sequences does without.
        from megatron_pp_ext.features.units.sliced_orders import rates_of
        from megatron_pp_ext.planner.step.estimate import planning_costs

        assert isinstance(option, Slices)
        sized = job_slices(work.job, option.tokens)
        return replace(sized, rates=rates_of(sized, planning_costs(work.job), work.placement))

    def record(self, candidate: Candidate) -> dict[str, Any]:
        slices = candidate.option(Slices)
        return {} if slices is None else {"slice_tokens": slices.tokens}


def choices(job: Job) -> tuple[Slices | None, ...]:
    """Return the slices in the candidates of a search, None for whole sequences.

    ``auto`` gives whole sequences, and those of ``sizes``.
    """
    tokens = job.pipeline.pipeline_slice_tokens
    if tokens is None:
        return (None,)
    if tokens != AUTO:
        option = job_slices(job, read_tokens(tokens))
        return (option if option.cuts else None,)
    return (None, *(job_slices(job, size) for size in sizes(job.model.seq_length)[1:]))


def _actions(candidate: Candidate) -> int:
    """Return the actions of a step in slices with split backwards, 0 for whole sequences."""
    slices = candidate.option(Slices)
    if slices is None or not slices.tokens:
        return 0
    units = candidate.microbatches * -(-slices.length // slices.tokens)
    return 3 * units * candidate.pipeline * candidate.chunks
