"""The stages into which a described model can be cut, and the layout that Megatron reads a cut from."""

import heapq
from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from math import fsum

from megatron_pp_ext.planner.layout.balance import balanced, levelled
from megatron_pp_ext.planner.layout.cut import Cut, bounds
from megatron_pp_ext.planner.step.stage_parts import Pieces, stage_parts
from megatron_pp_ext.request import layers
from megatron_pp_ext.request.refusals import stages_for_prediction
from megatron_pp_ext.schedule.placement import Placement

type _Seconds = tuple[float, float, float]


class ModelStages:
    """The stages of ``placement`` that can be cut from ``model``, the parts of ``args``'s model.

    The items of a cut are the transformer layers, and all depths of multi-token prediction as one item behind
    them.  ``is_split`` says whether backwards come in two halves.
    """

    def __init__(self, args: Namespace, model: Pieces, placement: Placement, is_split: bool = True) -> None:
        self._args, self._model, self.placement, self._is_split = args, model, placement, is_split
        self.layers = len(model.layers)
        self._prediction = "m" * (layers.value(args, "--mtp-num-layers") or 0)
        self.items = self.layers + bool(self._prediction)
        self._known: dict[tuple[int, int, int], _Seconds] = {}
        self._by_content: dict[tuple[object, ...], _Seconds] = {}

    @cached_property
    def least(self) -> Cut:
        """The fewest items of each stage.

        Only a stage that has the embedding or the loss does without a layer.  Where some layers of every
        stage are recomputed, every stage has them.
        """
        args, stages = self._args, self.placement.stages
        if args.recompute_method == "block":
            return (args.recompute_num_layers or 1,) * stages
        end = int(self.placement.shares_vocabulary)
        return (end, *[1] * (stages - 2), end)

    @cached_property
    def start(self) -> Cut:
        """The cut whose stages and ranks take equally long, as far as whole layers allow."""
        cut = self._balanced(self.least)
        # Where prediction cannot be trained there, it stays with the loss.
        return cut if self.can_be(cut) else self._balanced((*self.least[:-1], max(1, self.least[-1])))

    def _balanced(self, least: Cut) -> Cut:
        cut = balanced(self.items, self.seconds, least)
        return levelled(self.placement, cut, self.seconds, least)

    def can_be(self, cut: Cut) -> bool:
        """Whether multi-token prediction, the last item, is in a stage where Megatron can train it."""
        last = max(stage for stage, count in enumerate(cut) if count)
        return not self._prediction or last in stages_for_prediction(self.placement)

    def seconds(self, stage: int, first: int, end: int) -> _Seconds:
        """Return the seconds of F, I and W of ``stage`` if it has the items first, ..., end - 1."""
        role = 0 if stage == 0 else 2 if stage == self.placement.stages - 1 else 1
        key = role, first, end
        if key not in self._known:
            content = role, end > self.layers, *map(id, self._model.layers[first:end])
            if content not in self._by_content:
                self._by_content[content] = self._counted(*key)
            self._known[key] = self._by_content[content]
        return self._known[key]

    def _counted(self, role: int, first: int, end: int) -> _Seconds:
        """Return the seconds of a stage at the front of three, between the others, or at the end."""
        here, last = self._model.layers[first:end], self._model.layers[-1]
        count = len(here)
        # Prediction has another layer like the model's last one.
        row = (last, *here) if role == 2 else (*here, last)
        counts = ((count, 1, 0), (0, count, 1), (1, 0, count))[role]
        args = self._args
        if self._prediction:
            stages = ["E", "", "L"]
            stages[role if end > self.layers else 2 if role < 2 else 0] += self._prediction
            args = Namespace(**{**vars(args), "pipeline_model_parallel_layout": "|".join(stages)})
        parts = stage_parts(args, replace(self._model, layers=row), counts, self.placement.shares_vocabulary)
        costs = parts[role].costs(self._is_split)
        return costs.forward, costs.input_gradient, costs.weight_gradient

    def busiest_rank(self) -> float:
        """Return the seconds of a microbatch on the busiest rank at least, in whatever cut.

        Layers are dealt out one by one, each to the rank that has the least with it.  Each counts like the
        shortest, and the order of the layers does not count.
        """
        few = self.least[1]
        ranks, stages = range(self.placement.ranks), self.placement.stages
        places = {
            tuple(map(id, self._model.layers[at : at + few + 1])): at for at in range(self.layers - few)
        }
        layer = min(self._took(1, at, few + 1) - self._took(1, at, few) for at in places.values())
        bare = {
            stage: min(self._took(stage, at, self.least[stage]) for at in places.values())
            - self.least[stage] * layer
            for stage in {0, 1, stages - 1}
        }
        loads = [
            (sum(bare[min(stage, 1) if stage < stages - 1 else stage] for stage in own), rank)
            for rank in ranks
            for own in (self.placement.stages_of(rank),)
        ]
        heap = [(load + layer, rank) for load, rank in loads]
        heapq.heapify(heap)
        busiest = max(load for load, _ in loads)
        for _ in range(self.layers):
            busiest, rank = max(busiest, heap[0][0]), heap[0][1]
            heapq.heapreplace(heap, (heap[0][0] + layer, rank))
        return busiest

    def shortest_stage(self) -> float:
        """Return the seconds of a microbatch on a stage at least, but for the ends of the model."""
        few = self.least[1]
        return min(self._took(1, at, few) for at in range(self.layers - few + 1))

    def _took(self, stage: int, first: int, count: int) -> float:
        return fsum(self.seconds(stage, first, first + count))

    def layout(self, cut: Cut) -> str | None:
        """Return ``cut`` as --pipeline-model-parallel-layout; None where Megatron cuts so by itself."""
        has_prediction = bool(self._prediction)
        by_itself = self._by_itself and (*self._by_itself[:-1], self._by_itself[-1] + has_prediction)
        return None if cut == by_itself else self.spelled(cut)

    def spelled(self, cut: Cut) -> str:
        """Return ``cut`` as --pipeline-model-parallel-layout."""
        letters = [*"t" * self.layers, *([self._prediction] if self._prediction else [])]
        stages = ["".join(letters[first:end]) for _, first, end in bounds(cut)]
        return layers.spelled([f"E{stages[0]}", *stages[1:-1], f"{stages[-1]}L"])

    @cached_property
    def _by_itself(self) -> Cut | None:
        """The layers of each stage as Megatron cuts them without a layout; None where it cannot."""
        try:
            return tuple(layers.by_stage(self._args, self.placement.stages))
        except ValueError:
            return None
