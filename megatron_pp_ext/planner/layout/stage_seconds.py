"""The seconds of a stage with given layers, wherever it is in the pipeline; each is counted once."""

from dataclasses import replace

from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.stage_parts import stage_parts
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.layout.rows import Seconds, seconds_of

FIRST, MIDDLE, LAST = range(3)
"""Where a stage is: it has the embedding, only layers, or the output layer and the loss."""


class StageSeconds:
    """The seconds of stages of ``model``, the parts of ``job``'s model.

    ``splits_head`` says whether all ranks split the head.  The items of a stage are layers, and multi-token
    prediction as the last item of the model.
    """

    def __init__(self, job: Job, model: ModelParts, splits_head: bool = False) -> None:
        self._job, self.model = job, model
        self._splits_head = splits_head
        self.layers = len(model.layers)
        self.prediction = "m" * job.model.mtp_num_layers
        self._known: dict[tuple[int, int, int], Seconds] = {}
        self._by_content: dict[tuple[object, ...], Seconds] = {}

    def of(self, role: int, first: int, end: int) -> Seconds:
        """Return the seconds of a stage in the place ``role`` with the items first, ..., end - 1."""
        key = role, first, end
        if key not in self._known:
            content = role, self._predicts(first, end), *map(id, self.model.layers[first:end])
            if content not in self._by_content:
                self._by_content[content] = self._counted(*key)
            self._known[key] = self._by_content[content]
        return self._known[key]

    def _predicts(self, first: int, end: int) -> bool:
        return first <= self.layers < end

    def _counted(self, role: int, first: int, end: int) -> Seconds:
        """Return the seconds of a stage at the front of three, between the others, or at the end."""
        layers, last = self.model.layers[first:end], self.model.layers[-1]
        count = len(layers)
        # Prediction has another layer like the model's last one.
        row = (last, *layers) if role == LAST else (*layers, last)
        counts = ((count, 1, 0), (0, count, 1), (1, 0, count))[role]
        predicting = role if self._predicts(first, end) else LAST if role < LAST else FIRST
        parts = stage_parts(
            self._job, replace(self.model, layers=row), counts, self._splits_head, predicting=predicting
        )
        return seconds_of(parts[role].costs())
