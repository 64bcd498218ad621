"""The stages into which a described model can be cut, and the layout that Megatron reads a cut from."""

from functools import cached_property

from megatron_pp_ext.job import layers, layout_text
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.climb import levelled
from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.planner.layout.rows import Seconds
from megatron_pp_ext.planner.layout.stage_seconds import FIRST, LAST, MIDDLE, StageSeconds
from megatron_pp_ext.schedule.placement import Placement


def fewest(job: Job, placement: Placement) -> Cut:
    """Return the fewest layers of each stage of ``placement``.

    Only a stage that has the embedding or the loss does without a layer.  Where some layers of every stage
    are recomputed, every stage has them.
    """
    if job.memory.recomputes_first:
        return (job.memory.recomputed_together,) * placement.stages
    end = int(placement.splits_head)
    return (end, *[1] * (placement.stages - 2), end)


class ModelStages:
    """The stages of ``placement`` that can be cut from the model of ``job``, whose seconds are ``counted``.

    The items of a cut are the transformer layers, and all depths of multi-token prediction as one item after
    them.
    """

    def __init__(self, job: Job, stage_seconds: StageSeconds, placement: Placement) -> None:
        self._job, self._counted, self.placement = job, stage_seconds, placement
        self.layers, self._prediction = stage_seconds.layers, stage_seconds.prediction
        self.items = self.layers + bool(self._prediction)

    @cached_property
    def least(self) -> Cut:
        """The fewest items of each stage."""
        return fewest(self._job, self.placement)

    @cached_property
    def start(self) -> Cut:
        """The cut whose stages and ranks take equally long, as far as whole layers allow."""
        cut = levelled(self, self.least)
        # Where prediction cannot be trained there, it stays with the loss.
        return cut if self.can_be(cut) else levelled(self, (*self.least[:-1], max(1, self.least[-1])))

    def can_be(self, cut: Cut) -> bool:
        """Whether multi-token prediction, the last item, is in a stage where Megatron can train it."""
        at = self._predicting(cut)
        return at is None or at in layers.stages_for_prediction(self.placement)

    def layers_of(self, cut: Cut) -> Cut:
        """Return the transformer layers of each stage of ``cut``."""
        at = self._predicting(cut)
        return tuple(count - (stage == at) for stage, count in enumerate(cut))

    def layout_for(self, cut: Cut) -> str | None:
        """Return the layout that says where multi-token prediction is; None where it is with the loss."""
        return self.spelled(cut) if self._predicting(cut) not in (None, len(cut) - 1) else None

    def _predicting(self, cut: Cut) -> int | None:
        """Return the stage with multi-token prediction, the last item."""
        return max(stage for stage, count in enumerate(cut) if count) if self._prediction else None

    def seconds(self, stage: int, first: int, end: int) -> Seconds:
        """Return the seconds of F, I and W of ``stage`` if it has the items first, ..., end - 1."""
        role = FIRST if stage == 0 else LAST if stage == self.placement.stages - 1 else MIDDLE
        return self._counted.of(role, first, end)

    def layout(self, cut: Cut) -> str | None:
        """Return ``cut`` as --pipeline-model-parallel-layout; None where Megatron cuts so by itself."""
        return None if cut == self._by_itself else self.spelled(cut)

    def spelled(self, cut: Cut) -> str:
        """Return ``cut`` as --pipeline-model-parallel-layout."""
        letters = [*"t" * self.layers, *([self._prediction] if self._prediction else [])]
        stages = ["".join(letters[first:end]) for _, first, end in bounds(cut)]
        return layout_text.spelled([f"E{stages[0]}", *stages[1:-1], f"{stages[-1]}L"])

    def with_prediction(self, cut: Cut) -> Cut:
        """Return ``cut``, of layers alone, with multi-token prediction in the last stage if there is any."""
        return *cut[:-1], cut[-1] + bool(self._prediction)

    @cached_property
    def _by_itself(self) -> Cut | None:
        """The cut that Megatron makes without a layout; None where it cannot."""
        try:
            return self.with_prediction(tuple(layers.by_stage(self._job, self.placement.stages)))
        except ValueError:
            return None
