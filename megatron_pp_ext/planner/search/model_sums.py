"""Sums over the layers of a model, from which bounds follow without the stages of any cut.

A sum over all stages is one over all layers, and a model has few kinds of these.  Only which layers are
computed again depends on the stages, where every stage recomputes its first ones.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_pp_ext.costs.model_parts import ModelParts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.stage_parts import end_parts, kept_input, prediction_parts
from megatron_pp_ext.job.typed_job import Job


class LeastSeconds(NamedTuple):
    """The seconds of a microbatch that a stage takes at least, with a whole backward.

    ``first``, ``middle`` and ``last`` are those of a stage with its layers in ``fewest``, and ``layer`` those
    that one more layer adds.  ``forwards`` are those of a forward of the first stage and of a middle one.
    """

    first: float
    middle: float
    last: float
    layer: float
    forwards: tuple[float, float]
    fewest: tuple[int, int, int]


class ModelSums:
    """Sums over ``model``, of which all that follows from the cut of its layers is left out."""

    def __init__(self, model: ModelParts) -> None:
        self.model = model
        kinds = {id(layer): layer for layer in model.layers}
        self._kinds = tuple(kinds.values())
        # By kind: how many layers of it there are in front of each, and after the last.
        of_kind = np.array([[id(layer) == key for layer in model.layers] for key in kinds])
        self._before = np.concatenate([np.zeros((len(kinds), 1), int), of_kind.cumsum(axis=1)], axis=1)
        seconds = np.array([_seconds(layer) for layer in model.layers])
        forwards = np.array([layer.forward_seconds for layer in model.layers])
        self._plain, self._again, self._forwards = seconds, seconds + forwards, forwards
        self._totals: dict[tuple[object, ...], Part] = {}
        self._least: dict[tuple[object, ...], LeastSeconds] = {}

    def total(self, job: Job, cut: Sequence[int], splits_head: bool) -> Part:
        """Return the sum of the parts of all stages of ``cut``, whose temporary bytes are left out."""
        is_full, size = job.memory.recomputes_layers, job.memory.recomputed_together
        input_bytes = kept_input(job, self.model.hidden_bytes)
        if is_full and (job.memory.recomputes_first or size > 1):
            layers = self._recomputed(job, cut, size, input_bytes)
        else:
            key = (is_full,)
            if key not in self._totals:
                self._totals[key] = self._sum(
                    self._before[:, -1] * is_full, len(self.model.layers), input_bytes
                )
            layers = self._totals[key]
        other_parts = self._beside(job, splits_head, is_one=len(cut) == 1)
        return layers + other_parts + self.model.other.times(len(cut))

    def least(self, job: Job, fewest: Sequence[int], splits_head: bool) -> LeastSeconds:
        """Return lower bounds of stage seconds if the first, each middle and the last have so many layers."""
        few = fewest[0], fewest[1], fewest[-1]
        is_full, is_block = job.memory.recomputes_layers, job.memory.recomputes_first
        key = is_full, is_block, few, splits_head
        if key not in self._least:
            seconds = self._again if is_full else self._plain
            first, last = map(_summed, zip(*end_parts(self.model, splits_head), strict=True))
            last += prediction_parts(job, self.model, has_embedding=True)[1]
            other = self.model.other
            bare = other + first, other, other + last
            took = [
                _seconds(part) + _shortest_run(seconds, count) for part, count in zip(bare, few, strict=True)
            ]
            self._least[key] = LeastSeconds(
                first=took[0],
                middle=took[1],
                last=took[2],
                layer=float((self._plain if is_block else seconds)[few[1] :].min()),
                forwards=(
                    bare[0].forward_seconds + _shortest_run(self._forwards, few[0]),
                    bare[1].forward_seconds + _shortest_run(self._forwards, few[1]),
                ),
                fewest=few,
            )
        return self._least[key]

    def _beside(self, job: Job, splits_head: bool, is_one: bool) -> Part:
        """Return the parts of the stages besides their layers, or of the only one, but for each one's own."""
        key = "beside", splits_head, is_one
        if key not in self._totals:
            ends = [part for parts in end_parts(self.model, splits_head) for part in parts]
            self._totals[key] = _summed([*ends, *prediction_parts(job, self.model, has_embedding=is_one)])
        return self._totals[key]

    def _recomputed(self, job: Job, cut: Sequence[int], size: int, input_bytes: float) -> Part:
        """Return the sum of the layers where the recomputed ones depend on the stages.

        These are the first ``size`` of each stage, or all in groups of ``size``.
        """
        counts, ends = np.array(cut), np.array([*accumulate(cut)])
        starts = ends - counts
        if not job.memory.recomputes_first:
            return self._sum(self._before[:, -1], int((-(-counts // size)).sum()), input_bytes)
        again = np.minimum(counts, size)
        by_kind = (self._before[:, starts + again] - self._before[:, starts]).sum(axis=1)
        return self._sum(by_kind, int(again.sum()), input_bytes)

    def _sum(self, again: NDArray[np.float64], groups: int, input_bytes: float) -> Part:
        """Return the sum of all layers, of which so many of each kind are computed ``again``.

        They are in ``groups``, each of which keeps ``input_bytes``.
        """
        counts = zip(self._kinds, self._before[:, -1].tolist(), again.tolist(), strict=True)
        parts = [
            part
            for kind, count, repeated in counts
            for part in (kind.times(count - repeated), kind.recomputed(after_forward=0.0).times(repeated))
        ]
        return _summed([*parts, Part(after_forward=groups * input_bytes * bool(again.any()))])


def _seconds(part: Part) -> float:
    """Return the seconds of a forward and of a whole backward."""
    return part.forward_seconds + part.backward_seconds - part.overlapped_in_whole


def _shortest_run(seconds: NDArray[np.float64], count: int) -> float:
    """Return the least sum of ``count`` neighbours."""
    before = np.concatenate([[0.0], seconds.cumsum()])
    return float((before[count:] - before[: len(before) - count]).min())


def _summed(parts: Sequence[Part]) -> Part:
    first, *remaining = parts
    return sum(remaining, first)
