"""What microbatches cost in this run, by the lengths of their documents.

They cost what steps of the run have measured (--pipeline-profile-steps), once there are such; before that, or
without, what a file or a call gives for one length; else what the model's layers take by their arithmetic.
Where that is not known either, attention has the part of the time that it has in a model of 7 billion
parameters.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_pp_ext.features.guided.order import ProfileSteps
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.options import Ordering
from megatron_pp_ext.features.units.rates import EQUAL_AT, LengthCosts
from megatron_pp_ext.megatron.requested import Pipeline
from megatron_pp_ext.megatron.runners.flushed import Step
from megatron_pp_ext.runtime.rank import print_rank_0
from megatron_pp_ext.schedule.costs import Costs, UnitCosts

_LENGTH = 4096
"""The length at which the model's arithmetic is asked, and half of it: any two lengths give a line."""


class RunCosts:
    """The costs of the stages of ``pipeline``, the same on all ranks."""

    def __init__(self, pipeline: Pipeline, ordering: Ordering) -> None:
        self._pipeline = pipeline
        self._is_given = pipeline.costs is not None or bool(ordering.costs_from)
        self._is_to_be_measured = pipeline.request.option(ProfileSteps) is not None
        self._seen: dict[int, Microbatches] = {}
        self._fitted: LengthCosts | None = None
        self._of_model: LengthCosts | None = None

    def work(self, microbatches: Microbatches) -> list[float]:
        """Return the seconds that all stages together work on each microbatch."""
        return self.by_length(microbatches).work(microbatches)

    def note(self, step: int, microbatches: Microbatches) -> None:
        """Keep the ``microbatches`` of a step in their order, if the step may be measured.

        ``step`` is the number of training steps before it.
        """
        if self._is_to_be_measured:
            self._seen[step] = microbatches

    def learn(self, step: Step) -> None:
        """Take the costs that are nearest to what was measured by now, if something was."""
        if not self._is_to_be_measured or not step.measured:
            return
        self._is_to_be_measured = False
        documents: list[Sequence[int]] = []
        units: list[Costs] = []
        for number, costs in step.measured.items():
            seen = self._seen.get(number)
            if seen is not None and len(seen) == len(costs):
                documents += seen.documents
                units += costs
        self._seen.clear()
        if not units:
            return
        together = Microbatches.of(documents)
        stages = units[0].stages
        fitted = LengthCosts.fitted(together, UnitCosts(stages, units=tuple(units), tokens=together.tokens))
        self._of_model = self._of_model or self._estimate()
        self._fitted = fitted.with_slices_of(self._of_model)
        print_rank_0(
            f"megatron_pp_ext: microbatches are ordered by what {len(units)} measured ones took: attention "
            f"to {self._fitted.equal_at:,.0f} tokens takes as long as all else"
        )

    def by_length(self, microbatches: Microbatches) -> LengthCosts:
        """Return the costs of the stages by the lengths of documents, of which a step has these."""
        if self._fitted is not None:
            return self._fitted
        self._of_model = self._of_model or self._estimate()
        mean = sum(microbatches.tokens) / len(microbatches)
        if not self._is_given:
            return _with_messages_of(self._of_model, mean / _LENGTH)
        assert self._pipeline.source is not None
        costs = self._pipeline.costs or self._pipeline.source.costs
        length, documents = costs.sizes.get("seq_length"), costs.sizes.get("micro_batch_size", 1)
        if not length:
            # Nothing states the length of the costs: they are those of a mean microbatch.
            length = max(1, int(mean))
        cut = costs.merged(self._pipeline.placement.stages)
        rates = LengthCosts.measured(cut, length, documents, self._of_model.equal_at)
        if not cut.sequence:
            rates = rates.with_slices_of(self._of_model)
        return _with_messages_of(rates, mean / (length * documents))

    def _estimate(self) -> LengthCosts:
        placement, model = self._pipeline.placement, self._pipeline.settings.estimate
        if model is not None:
            try:
                halves, whole = model.at(_LENGTH // 2, 2), model.at(_LENGTH, 1)
                return LengthCosts.through(halves.of(placement), 2, whole.of(placement), _LENGTH)
            except ValueError as error:  # any model may train, also one that the estimate does not know
                print_rank_0(
                    f"megatron_pp_ext: {error}; microbatches count as in a model of 7 billion "
                    f"parameters, where attention to {EQUAL_AT:,} tokens takes as long as all else"
                )
        return LengthCosts.with_attention(Costs.per_rank(placement.ranks, placement.chunks), 1)


def _with_messages_of(costs: LengthCosts, part: float) -> LengthCosts:
    """Return ``costs`` with messages of this part of the length, which are those of a mean microbatch."""
    return replace(costs, hop=costs.hop * part, message=costs.message * part)
